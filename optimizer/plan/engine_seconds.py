"""Measures the engine's time around a step on this machine, with an executor that computes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from statistics import median

import numpy as np

from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps, StepInput, StepOutput

_STEPS, _PROMPT = 40, 64


class _Idle:
    """An executor that computes nothing, so that a step takes only the engine's own time."""

    caps = ExecutorCaps()

    def __init__(self, groups: Sequence[CacheGroup], requests: int, context: int) -> None:
        self.cache_groups = tuple(groups)
        self.blocks = {g.name: requests * -(-context // g.block_size) for g in self.cache_groups}

    def submit(self, step: StepInput) -> Future[StepOutput]:
        done: Future[StepOutput] = Future()
        done.set_result(StepOutput(tokens=np.zeros(len(step.rows), np.int32)))
        return done

    def describe(self) -> dict[str, str | int]:
        return {}

    def close(self) -> None:
        pass


def engine_seconds(groups: Sequence[CacheGroup], requests: int) -> float:
    """Returns the seconds of the engine's part of a step in which ``requests`` requests decode: scheduling, arrays,
    tokens.

    It is the median of several steps. ``groups`` are the cache groups of the program.
    """
    most = _STEPS + 2
    engine = Engine(_Idle(groups, requests, _PROMPT + most), SchedulerConfig(requests, requests * _PROMPT))
    for i in range(requests):
        engine.add_request(Generation([i] * _PROMPT, SamplingParams(max_tokens=most, ignore_eos=True)))
    engine.step()
    seconds = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return median(seconds)
