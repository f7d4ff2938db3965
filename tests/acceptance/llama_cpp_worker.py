"""Computes logits of GGUF files with llama-cpp-python, one line of JSON in and one out for each file.

It runs in a process of its own: llama.cpp aborts on keys that it finds impossible.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt


def logits_of(path: str, ids: list[int]) -> npt.NDArray[np.float32]:
    """The logits [S, V] with keys, values and arithmetic in float32. Raises ValueError if the file isn't loaded."""
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    options.use_mmap = False
    model = llama_cpp.llama_model_load_from_file(path.encode(), options)
    if not model:
        raise ValueError("not loaded")
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 64
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = 0  # GGML_TYPE_F32
    settings.flash_attn_type = 0  # LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        llama_cpp.llama_model_free(model)
        raise ValueError("no context")
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
    try:
        if llama_cpp.llama_decode(context, batch):
            raise ValueError("not decoded")
        size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        pointer = llama_cpp.llama_get_logits(context)
        return np.ctypeslib.as_array(pointer, (len(ids), size)).copy()
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


messages: list[str] = []


@llama_cpp.llama_log_callback
def _log(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    if level >= 4:  # GGML_LOG_LEVEL_ERROR
        messages.append(text.decode(errors="replace").strip())


def main() -> None:
    """Answers each line of standard input: the file with the logits, or the error."""
    llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        messages.clear()
        try:
            np.save(request["out"], logits_of(request["path"], request["ids"]))
            answer = {"out": str(Path(request["out"]))}
        except ValueError as e:
            answer = {"error": "; ".join([str(e), *messages])[-600:]}
        print(f"answer: {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
