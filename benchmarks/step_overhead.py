"""The cost of a step outside the program: our scheduler, sampler and text, on executors that compute nothing.

    python benchmarks/step_overhead.py [--requests 1 16 64] [--steps 300] [--vocabulary 49152] [--json FILE]

Each line is microseconds a step of so many requests that all decode: the mean of engine, prefixes, text and
slots, since blocks are taken in some; the median of the sampler's:

- engine: scheduling, the arrays of a step, and what becomes of its tokens, with blocks of 32 tokens;
- prefixes: the same with the prefix cache, in which nothing is found;
- deadlines: the same as engine, where each request has a class with targets, of two classes;
- penalties: the same as engine, where each request has a repetition, a frequency and a presence penalty;
- text: the same, where each request has text, which is read after every step (``--tokenizer BUNDLE``);
- slots: the same as engine over an executor of slots, whose runs give logits at once, with greedy choice of them;
- sampler: rows of logits alone, as greedy, top_k, top_p or logprobs want them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from enginewright.plugins.native.sampling import RowSampler
from enginewright.plugins.steps.slot_steps import SlotSteps
from enginewright.plugins.steps.slots import SlotRun
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.requests.logit_rules import sampling_batch
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.request_class import NO_TARGETS
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.scheduler.options import Scheduling
from enginewright.runtime.shared.contracts import (
    CacheGroup,
    ExecutorCaps,
    FloatArray,
    Int32Array,
    StepInput,
    StepOutput,
)
from enginewright.runtime.text.output_text import OutputText
from enginewright.runtime.text.tokenizer import Tokenizer

PROMPT = 40
CONTEXT = 4096
SAMPLERS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=1.0),
    "top_k 40": SamplingParams(temperature=1.0, top_k=40),
    "top_p 0.95": SamplingParams(temperature=1.0, top_p=0.95),
    "5 logprobs": SamplingParams(logprobs=5),
}
PENALTIES = SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5, presence_penalty=0.5)


class Idle:
    """An executor with blocks, which gives all requests the same token in a step."""

    caps = ExecutorCaps(shared_blocks=True)
    cache_groups: tuple[CacheGroup, ...] = (CacheGroup("full", (0,), 1, 1, 1),)

    def __init__(self, requests: int) -> None:
        self.blocks = {"full": requests * CONTEXT // self.cache_groups[0].block_size}
        self._output = StepOutput(tokens=None)
        self._token = 0

    def submit(self, step: StepInput) -> Idle:
        self._output = self.run(step)
        return self

    def run(self, step: StepInput) -> StepOutput:
        """A token for each row."""
        self._token += 1
        return StepOutput(tokens=np.full(len(step.rows), 300 + self._token % 200, np.int32))

    def result(self) -> StepOutput:
        """Gives the result of the step that was submitted last."""
        return self._output

    def describe(self) -> dict[str, str | int]:
        return {"target": "none"}

    def close(self) -> None:
        pass


class IdleCaches:
    """Slots whose runs give logits that are there already."""

    length = CONTEXT

    def __init__(self, logits: FloatArray) -> None:
        self._logits = logits

    def fit(self, slot_of: Int32Array, kv_len: Int32Array) -> None:
        pass

    def run(self, run: SlotRun) -> FloatArray:
        """Logits of the wanted tokens of a run: [R, V]."""
        return self._logits[: len(run.wanted)]

    def forget(self, slots: Int32Array) -> None:
        pass

    def clear(self) -> None:
        pass


class IdleSlots(Idle):
    """An executor with slots, which samples as that of the onnx target does."""

    cache_groups = (CacheGroup("full", (0,), 1, 1, 1, block_size=CONTEXT),)

    def __init__(self, requests: int, vocabulary: int, threads: int) -> None:
        super().__init__(requests)
        self.blocks = {"full": requests}
        self.caps = ExecutorCaps(ragged=False, max_requests=requests)
        caches = IdleCaches(random_logits(requests, vocabulary))
        self._steps = SlotSteps(caches, self.cache_groups, requests, threads, chunks_together=False)

    def run(self, step: StepInput) -> StepOutput:
        """Plans the runs, and samples what they give."""
        return self._steps.run(step)


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints a table, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the sampler")
    parser.add_argument("--tokenizer", type=Path, help="a bundle whose tokenizer gives text")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args(arguments)
    figures: dict[str, dict[int, float]] = {}
    for requests in options.requests:
        for name, microseconds in measure(requests, options):
            figures.setdefault(name, {})[requests] = round(microseconds, 1)
    print(f"{'us a step':<24}" + "".join(f"{n:>10}" for n in options.requests))
    for name, by_requests in figures.items():
        print(f"{name:<24}" + "".join(f"{us:>10.1f}" for us in by_requests.values()))
    if options.json:
        options.json.write_text(json.dumps({"workload": sys.argv[1:], "us_per_step": figures}, indent=1) + "\n")
    return 0


def measure(requests: int, options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Names and microseconds a step."""
    rounds = [
        [engine_step(Idle(requests), requests, options.steps, prefixes=on) for on in (False, True)] for _ in range(5)
    ]
    yield "engine", median(off for off, _ in rounds)
    yield "prefixes", median(on for _, on in rounds)
    late = Scheduling(classes={"default": {"ttft": 1.0, "tpot": 0.04}, "batch": {}})
    yield (
        "deadlines",
        median(engine_step(Idle(requests), requests, options.steps, scheduling=late) for _ in range(5)),
    )
    yield "penalties", median(engine_step(Idle(requests), requests, options.steps, params=PENALTIES) for _ in range(5))
    if options.tokenizer:
        tokenizer = Tokenizer(Bundle.open(options.tokenizer).tokenizer_files())
        yield "text", engine_step(Idle(requests), requests, options.steps, tokenizer=tokenizer)
    slots = IdleSlots(requests, options.vocabulary, options.threads)
    yield "slots", engine_step(slots, requests, options.steps)
    logits, sampler = random_logits(requests, options.vocabulary), RowSampler(options.threads)
    for name, params in SAMPLERS.items():
        batch = sampling_batch([(params, seed, 0) for seed in range(requests)])
        yield f"sampler, {name}", median_us(partial(sampler.sample, logits, batch), options.steps)


def engine_step(
    executor: Executor,
    requests: int,
    steps: int,
    *,
    tokenizer: Tokenizer | None = None,
    prefixes: bool = False,
    params: SamplingParams = SamplingParams(),
    scheduling: Scheduling | None = None,
) -> float:
    """Microseconds of a step in which all requests decode: the mean, since some steps take blocks."""
    config = SchedulerConfig(requests, PROMPT * requests, prefix_cache=prefixes, scheduling=scheduling)
    engine = Engine(executor, config)
    promised = NO_TARGETS if scheduling is None else scheduling.class_named(None)
    params = replace(params, max_tokens=steps + 10, ignore_eos=True)
    for first in range(requests):
        text = None if tokenizer is None else OutputText(tokenizer.detokenizer(()), ())
        engine.add_request(Generation(range(first, first + PROMPT), params, text=text, request_class=promised))
    engine.step()  # the prompts

    def step() -> None:
        for request in engine.step():
            if tokenizer is not None:
                request.take_piece()

    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps * 1e6


def median_us(call: Callable[[], object], times: int) -> float:
    """Microseconds of a call."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds) * 1e6


def random_logits(rows: int, vocabulary: int) -> FloatArray:
    """[rows, vocabulary]"""
    return np.random.default_rng(0).standard_normal((rows, vocabulary), np.float32) * 3


if __name__ == "__main__":
    sys.exit(main())
