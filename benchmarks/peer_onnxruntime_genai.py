"""Measures onnxruntime-genai on a folder of its model builder: one Generator, one token of each request a step."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import onnxruntime_genai as genai
from workload import Speeds, Workload, serve


def measure(path: str, work: Workload) -> Speeds:
    """Prefill and decode speeds, after a short warm-up. Caches have the context that ours have."""
    config = genai.Config(path)
    options = {"intra_op_num_threads": work.threads, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    model = genai.Model(config)
    long, short = work.prompts()
    _run(model, work, [long[::-1][:64]], 4)
    prefill, decode = _run(model, work, [long], work.steps)
    _, decode_batch = _run(model, work, short, work.steps)
    return Speeds(
        prefill=work.prompt / prefill,
        decode_1=work.steps / decode,
        decode_batch=work.batch * work.steps / decode_batch,
        engine=f"onnxruntime-genai {genai.__version__}",
    )


def _run(model: Any, work: Workload, prompts: list[list[int]], steps: int) -> tuple[float, float]:
    """Seconds of the prompts and their first tokens, and of the ``steps`` steps after that."""
    params = genai.GeneratorParams(model)
    # Nothing ends early: the end token is forbidden until the longest length.
    params.set_search_options(
        do_sample=False, batch_size=len(prompts), max_length=work.context + 1, min_length=work.context + 1
    )
    generator = genai.Generator(model, params)
    start = time.perf_counter()
    generator.append_tokens(np.array(prompts, np.int32))
    generator.generate_next_token()
    prefilled = time.perf_counter()
    for _ in range(steps):
        generator.generate_next_token()
    seconds = time.perf_counter() - prefilled
    del generator
    return prefilled - start, seconds


if __name__ == "__main__":
    serve(measure)
