"""transformers' eager, in bf16: python -m peers.workers.eager (uncached | cached | reference) FOLDER WORKLOAD LOGITS

"uncached" computes everything before a token again, "cached" has transformers' KV cache; each prints a Report with
``decode_1``, tokens a second, and ``kl`` from the logits in the file LOGITS. "reference" writes that file: those of the
source in 32-bit floats, on text that every Python brings.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from peers.agent import english
from peers.workload import Report, Workload, kl_divergence

TEXT_TOKENS, CHUNK, EVERY = 512, 16, 8
"""Tokens of the text; so many of them a step with the cache; one step in so many is timed without the cache."""


def opened(folder: str, dtype: torch.dtype) -> Any:
    """The model, with the attention that writes all scores down."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def seconds_uncached(model: Any, prompt: torch.Tensor, steps: int) -> float:
    """Times a step, on average over so many behind the prompt [1, T]; one in EVERY is timed, with tokens of the prompt
    in the place of new ones, which takes as long."""
    seconds = []
    for more in range(0, steps, EVERY):
        ids = torch.cat([prompt, prompt.repeat(1, more // prompt.shape[1] + 1)[:, :more]], 1)
        start = time.perf_counter()
        model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.argmax(-1)
        seconds.append(time.perf_counter() - start)
    return mean(seconds)


def seconds_cached(model: Any, prompt: torch.Tensor, steps: int) -> float:
    """Times a step, on average over so many behind the prompt [1, T], greedily."""
    out = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    start = time.perf_counter()
    for _ in range(steps):
        best = out.logits[:, -1:].argmax(-1)
        out = model(input_ids=best, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
    return (time.perf_counter() - start) / steps


def logits_uncached(model: Any, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[T, V], all in one step."""
    rows: np.ndarray[Any, np.dtype[np.float32]] = model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
    return rows


def logits_cached(model: Any, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[T, V], CHUNK tokens a step, each behind what the cache has."""
    past, parts = None, []
    for first, last in pairwise([*range(0, len(ids), CHUNK), len(ids)]):
        out = model(torch.tensor([ids[first:last]]), past_key_values=past, use_cache=True)
        past = out.past_key_values
        parts.append(out.logits[0].float().numpy())
    return np.concatenate(parts)


HOW = {"uncached": (seconds_uncached, logits_uncached), "cached": (seconds_cached, logits_cached)}


def measured(how: str, folder: str, work: Workload, reference: Path) -> Report:
    """Speed, bytes of the weights, and the KL divergence where there is a reference; see the module."""
    seconds, logits = HOW[how]
    model = opened(folder, torch.bfloat16)
    warm, prompt = (torch.tensor(work.prompts(1, work.prompt, stream=stream)) for stream in (1, 0))
    seconds(model, warm, 2)
    figures = {"decode_1": 1 / seconds(model, prompt, work.steps)}
    if reference.name:
        with np.load(reference) as arrays:
            figures["kl"] = kl_divergence(arrays["logits"], logits(model, [int(i) for i in arrays["ids"]]))
    size = sum(p.numel() * p.element_size() for p in model.parameters())  # a table that is the head too counts once
    return Report(f"transformers {transformers.__version__}", "eager, bf16", figures, {"weights": size})


def write_reference(folder: str, target: Path) -> Report:
    """Logits [T, V] of the source, and the tokens beside them."""
    ids = AutoTokenizer.from_pretrained(folder)(english()[: 8 * TEXT_TOKENS])["input_ids"][:TEXT_TOKENS]
    np.savez(target, ids=np.asarray(ids, np.int32), logits=logits_uncached(opened(folder, torch.float32), ids))
    return Report("")


def main(arguments: list[str]) -> int:
    """The command line."""
    how, folder, text, target = arguments
    work = Workload.parse(text)
    torch.set_num_threads(work.threads)
    with torch.inference_mode():
        report = (
            write_reference(folder, Path(target)) if how == "reference" else measured(how, folder, work, Path(target))
        )
    print(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
