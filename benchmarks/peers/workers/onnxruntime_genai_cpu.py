"""Measures onnxruntime-genai on a folder of its model builder: one Generator, one token of each request a step."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime_genai

from peers.workload import START_PROMPT, Report, Workload, first_token, serve

ENGINE = f"onnxruntime-genai {onnxruntime_genai.__version__}"
SETTINGS = "model builder, groups of 32, accuracy level 4, past and present shared"


def load(path: str, threads: int) -> Any:
    """The model, with so many threads."""
    config = onnxruntime_genai.Config(path)
    options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    return onnxruntime_genai.Model(config)


def generator(model: Any, requests: int, longest: int) -> Any:
    """For so many requests; nothing ends early, since the end token is forbidden until the longest length."""
    params = onnxruntime_genai.GeneratorParams(model)
    params.set_search_options(do_sample=False, batch_size=requests, max_length=longest, min_length=longest)
    return onnxruntime_genai.Generator(model, params)


def run(model: Any, prompts: list[list[int]], steps: int) -> tuple[float, float]:
    """Seconds of the prompts and their first tokens, and of the ``steps`` steps after that."""
    generating = generator(model, len(prompts), len(prompts[0]) + steps + 2)
    start = time.perf_counter()
    generating.append_tokens(np.array(prompts, np.int32))
    generating.generate_next_token()
    prefilled = time.perf_counter()
    for _ in range(steps):
        generating.generate_next_token()
    seconds = time.perf_counter() - prefilled
    del generating
    return prefilled - start, seconds


def speed(path: str, work: Workload) -> Report:
    """Measures prefill and decode speeds; see ``workload``."""
    model = load(path, work.threads)
    run(model, work.prompts(1, 64, stream=1), 4)
    prefill, decode = run(model, work.prompts(1, work.prompt), work.steps)
    figures = {"prefill": work.prompt / prefill, "decode_1": work.steps / decode}
    for batch in work.batches:
        _, decode = run(model, work.prompts(batch, work.short_prompt, stream=batch), work.steps)
        figures[f"decode_{batch}"] = batch * work.steps / decode
    return Report(ENGINE, SETTINGS, figures)


def long(path: str, work: Workload) -> Report:
    """Measures a long prompt; see ``workload``."""
    model = load(path, work.threads)
    run(model, work.prompts(1, 64, stream=1), 4)
    prefill, decode = run(model, work.prompts(1, work.long_prompt), work.long_steps)
    figures = {"prefill_long": work.long_prompt / prefill, "decode_long": work.long_steps / decode}
    return Report(ENGINE, SETTINGS, figures)


def start(path: str, work: Workload) -> Report:
    """Runs up to the first token; see ``workload``."""
    run(load(path, work.threads), work.prompts(1, START_PROMPT), 0)
    first_token()
    return Report(ENGINE)


def logits(path: str, ids: list[int]) -> npt.NDArray[np.float32]:
    """[T, V]."""
    generating = generator(load(path, 2), 1, len(ids) + 8)
    generating.append_tokens(np.array([ids], np.int32))
    return np.asarray(generating.get_output("logits")[0], np.float32)


if __name__ == "__main__":
    serve(sys.modules[__name__])
