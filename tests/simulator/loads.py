"""Serves a load of many requests by the real engine, without a model: only lengths and times matter.

The engine measures the simulated steps as it measures real ones. It knows neither how long answers will be nor the
clock's model. Steps take about as long as those of SmolLM2 (int8) on two cores, each 5 % more or less at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.executors.base import Deferred, Pending
from enginewright.runtime.requests.request import Generation, Request
from enginewright.runtime.requests.request_options import RequestOptions
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.scheduler.options import Scheduling
from enginewright.runtime.scheduler.step_times import StepSize
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps, StepInput, StepOutput
from enginewright.runtime.shared.errors import EnginewrightError, OverloadError

from .executor import Clock
from .model import END

MOST_TOKENS = 256
BLOCKS, BLOCK = 4096, 32


@dataclass(frozen=True)
class Arrival:
    """A request of a load: when it comes, its prompt and answer in tokens, its class and its tenant."""

    at: float
    prompt: int
    answer: int
    of_class: str
    tenant: str = ""


@dataclass(frozen=True)
class Served:
    """The times of one request.

    Attributes:
        first, token: seconds to the first token, and for each further one; None if it was refused, or has none.
        ended: when it ended.
        retry_after: seconds after which a request that was refused may come again.
    """

    arrival: Arrival
    first: float | None
    token: float | None
    ended: float
    retry_after: float | None = None


def seconds(size: StepSize) -> float:
    """The seconds of a step: the clock's model."""
    base = 3.5e-3 * size.steps + 0.45e-3 * size.rows + 1.3e-6 * size.context
    return base + 0.4e-3 * size.prompt + 0.1e-6 * size.products


class CountingExecutor:
    """Ends each answer where its request's seed says so: the seed is the number of its tokens."""

    def __init__(self, clock: Clock, seed: int) -> None:
        self.caps = ExecutorCaps(shared_blocks=True)
        self.cache_groups = (
            CacheGroup("full", (0,), kv_heads=1, key_head_size=1, value_head_size=1, block_size=BLOCK),
        )
        self.blocks: Mapping[str, int] = {"full": BLOCKS}
        self._clock, self._rng = clock, np.random.default_rng(seed)

    def submit(self, step: StepInput) -> Pending:
        """Takes a step and advances the clock by its predicted seconds."""
        counts = np.diff(step.q_start)
        decodes = counts == 1
        prompts, lengths = counts[~decodes], step.kv_len[~decodes]
        size = StepSize(
            int(decodes.sum()),
            int(prompts.sum()),
            int(step.kv_len[decodes].sum()),
            int((prompts * (2 * lengths - prompts) // 2).sum()),
        )
        self._clock.now += seconds(size) * (1 + 0.05 * float(self._rng.standard_normal()))
        return Deferred(self._run, step)

    @staticmethod
    def _run(step: StepInput) -> StepOutput:
        if step.sampling is None:
            return StepOutput(tokens=None)
        ended = step.sampling.counter + 1 >= step.sampling.seed
        return StepOutput(tokens=np.where(ended, END, 0).astype(np.int32))

    def describe(self) -> dict[str, str | int]:
        """Names the target "counting"."""
        return {"target": "counting"}

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


def simulate(load: Sequence[Arrival], scheduling: Scheduling | None, seed: int = 0, most: int = 64) -> list[Served]:
    """Serves a load; ``most`` requests run at a time."""
    clock = Clock()
    clock.now = 0.0
    offline = scheduling is not None and scheduling.offline
    config = SchedulerConfig(most, scheduling=scheduling, prefill_tokens=2048 if offline else 512)
    engine = Engine(CountingExecutor(clock, seed), config, clock=clock)
    arrivals, served = iter(load), []
    following = next(arrivals, None)
    running: dict[Request, Arrival] = {}
    prompts = [0] * 2048
    while following is not None or engine.has_work():
        if not engine.has_work() and following is not None:
            clock.now = max(clock.now, following.at)
        while following is not None and following.at <= clock.now:
            request = _request(following, prompts, scheduling, clock)
            try:
                engine.add_request(request)
                running[request] = following
            except EnginewrightError as e:
                retry = e.retry_after if isinstance(e, OverloadError) else None
                served.append(Served(following, None, None, clock.now, retry))
            following = next(arrivals, None)
        if engine.has_work():
            served += [_served(running.pop(r), r, clock.now) for r in engine.step() if r.finished]
    assert len(served) == len(load), "every request has ended"
    assert all(pool.free_blocks == pool.total_blocks for pool in engine.pools.values()), "no block is lost"
    return served


@cache
def _params(answer: int) -> SamplingParams:
    return SamplingParams(max_tokens=MOST_TOKENS, seed=answer)


def _request(arrival: Arrival, prompts: list[int], scheduling: Scheduling | None, clock: Clock) -> Request:
    promised: dict[str, Any] = {}
    if scheduling is not None and arrival.of_class in scheduling.classes:
        promised["request_class"] = scheduling.class_named(arrival.of_class)
    request = Generation(
        prompts[: arrival.prompt],
        _params(arrival.answer),
        end_token_ids=(END,),
        options=RequestOptions(arrival.tenant),
        clock=clock,
        **promised,
    )
    request.queued = arrival.at  # a step was running
    return request


def _served(arrival: Arrival, request: Request, now: float) -> Served:
    assert request.token_times is not None
    first, last = request.token_times
    each = (last - first) / (request.output_length - 1) if request.output_length > 1 else None
    return Served(arrival, first - request.queued, each, now)
