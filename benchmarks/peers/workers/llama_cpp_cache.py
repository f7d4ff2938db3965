"""Measures llama.cpp's formats of the KV cache: the KL divergence of next tokens from those of its own f16 cache.

    python -m peers.workers.llama_cpp_cache MODEL.gguf TEXT.npz THREADS TYPE...

TYPE is the type of keys and values, such as q8_0. TEXT.npz has ``ids``, the ``places`` that are compared, and the
arrays of ``needles.Needles``. A row of figures is a line of JSON. Types of integers are rotated unless the variable
LLAMA_ATTN_ROT_DISABLE is set.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from needles import Needles

from peers.workers import llama_cpp as shared

BATCH = 512
BITS = {"f16": 16.0, "q8_0": 8.5, "q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0, "q4_0": 4.5}
"""Bits of a number, with its share of scales."""

Array = npt.NDArray[np.float32]


def logits(model: Any, ids: Sequence[int], places: npt.NDArray[np.int64], cache: str, threads: int) -> Array:
    """Returns the logits at ``places`` [P, V] with keys and values in ``cache``."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = len(ids), BATCH, BATCH, 1
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = 1
    params.type_k = params.type_v = getattr(llama_cpp, f"GGML_TYPE_{cache.upper()}")
    context = llama_cpp.llama_init_from_model(model, params)
    if context is None:
        sys.exit(f"llama.cpp can't make a context with a cache of {cache}")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    chosen, parts = set(places.tolist()), []
    for first in range(0, len(ids), BATCH):
        some = ids[first : first + BATCH]
        batch = llama_cpp.llama_batch_init(len(some), 0, 1)
        batch.n_tokens = len(some)
        for i, token in enumerate(some):
            batch.token[i], batch.pos[i] = token, first + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = first + i in chosen
        if llama_cpp.llama_decode(context, batch) != 0:
            sys.exit("llama_decode failed")
        rows = sum(batch.logits[i] for i in range(len(some)))
        if rows:
            pointer = llama_cpp.llama_get_logits(context)
            parts.append(np.ctypeslib.as_array(pointer, (rows, vocabulary)).copy())
        llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    return np.concatenate(parts)


def distance(exact: Array, found: Array) -> dict[str, float]:
    """Returns the mean KL(exact || found) in nats, its 99th percentile, and the share of equal best tokens."""
    kls = []
    for a, b in zip(exact, found, strict=True):
        p, q = (x - x.max() - np.log(np.exp(x - x.max()).sum()) for x in (a.astype(np.float64), b.astype(np.float64)))
        kls.append(float((np.exp(p) * (p - q)).sum()))
    same = exact.argmax(1) == found.argmax(1)
    return {"kl": float(np.mean(kls)), "kl_99": float(np.quantile(kls, 0.99)), "top_1": float(same.mean())}


def main() -> None:
    """Prints a row for each type, the first for f16."""
    path, text, threads, *types = sys.argv[1:]
    arrays = dict(np.load(text))
    needles = Needles(arrays["ids"].tolist(), arrays["answers"], arrays["tokens"], arrays["owners"])
    every = np.unique(np.concatenate([arrays["places"], needles.places]))
    compared, answers = (np.searchsorted(every, some) for some in (arrays["places"], needles.places))
    model = shared.load(path)
    rotated = not os.environ.get("LLAMA_ATTN_ROT_DISABLE")
    exact = np.zeros((0, 0), np.float32)
    for cache in ("f16", *types):
        rows = logits(model, needles.ids, every, cache, int(threads))
        if cache == "f16":
            exact = rows[compared]
        label = f"llama.cpp: {cache}, {cache}" + ("; rotated" if rotated and cache != "f16" else "")
        row = {"format": label, "engine": shared.ENGINE, "bits": BITS[cache]}
        print(json.dumps(row | distance(exact, rows[compared]) | needles.score(rows[answers])), flush=True)


if __name__ == "__main__":
    main()
