"""Loads for schedulers, a simulator of an engine, and what is said of a run. The clock is a model of what steps cost.

The scheduler is the real one; it measures the simulated steps as it measures real ones, and knows neither how long
answers will be nor what the clock's model is. Steps take as long as those of SmolLM2 (int8) on two cores, or so,
each 5 % more or less at random.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from enginewright.runtime.requests.request import Generation, Request
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.continuous import ContinuousScheduler
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.scheduler.options import Scheduling
from enginewright.runtime.scheduler.step_times import StepSize
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps, StepOutput
from enginewright.runtime.shared.errors import EnginewrightError, OverloadError

END = 1
MOST_TOKENS = 256
BLOCKS, BLOCK = 4096, 32
PARAMS = SamplingParams(max_tokens=MOST_TOKENS, seed=0)


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
    """What became of one; ``first``, ``token`` in seconds, None if it was refused or has no such time."""

    arrival: Arrival
    first: float | None
    token: float | None
    ended: float
    retry_after: float | None = None


def seconds(size: StepSize) -> float:
    """Says what a step takes: the clock's model."""
    base = 3.5e-3 * size.steps + 0.45e-3 * size.rows + 1.3e-6 * size.context
    return base + 0.4e-3 * size.prompt + 0.1e-6 * size.products


def bursts(requests: int, rate: float, seed: int, batch: float = 0.15) -> list[Arrival]:
    """Requests at ``rate`` a second on average: bursts of five times the usual rate, some 4 of 20 seconds.

    ``batch``: share of long requests of class "batch"; the others are "chat".
    """
    rng = np.random.default_rng(seed)
    calm, at, found, until, high = rate / 1.8, 0.0, [], 0.0, True
    while len(found) < requests:
        if at >= until:
            high = not high
            until = at + rng.exponential(4.0 if high else 16.0)
        at += rng.exponential(1 / (calm * (5 if high else 1)))
        if rng.random() < batch:
            found.append(Arrival(at, _length(rng, 400), _length(rng, 100), "batch"))
        else:
            found.append(Arrival(at, _length(rng, 80), _length(rng, 40), "chat"))
    return found


def day(rate: float, seed: int, hours: float = 24.0) -> list[Arrival]:
    """A day: at 3 o'clock a fifth of the requests of 15 o'clock; ``rate``: a second, on average over the day."""
    rng = np.random.default_rng(seed)
    found, at, most = [], 0.0, rate * 5 / 3
    while (at := at + rng.exponential(1 / most)) < hours * 3600:
        share = 0.6 - 0.4 * np.cos((at / 3600 - 3) / 12 * np.pi)  # of the most
        if rng.random() > share:
            continue
        kind, prompt, answer = ("batch", 400, 100) if rng.random() < 0.15 else ("chat", 80, 40)
        tenant = f"t{rng.integers(50)}"
        found.append(Arrival(at, _length(rng, prompt), _length(rng, answer), kind, tenant))
    return found


def greedy(requests: int, rate: float, seed: int, tenants: int = 4) -> list[Arrival]:
    """Makes as many requests of one tenant, "greedy", as three others send together, and as many again."""
    rng = np.random.default_rng(seed)
    ats = np.cumsum(rng.exponential(1 / rate, requests))
    share = 1 / (3 * (tenants - 1))
    names = rng.choice(["greedy", *(f"t{i}" for i in range(1, tenants))], requests, p=[2 / 3, *[share] * (tenants - 1)])
    return [
        Arrival(float(at), _length(rng, 80), _length(rng, 40), "chat", str(n)) for at, n in zip(ats, names, strict=True)
    ]


def _length(rng: np.random.Generator, median: int) -> int:
    return int(np.clip(rng.lognormal(np.log(median), 0.7), 4, min(4 * median, 1200)))


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def simulate(load: Sequence[Arrival], scheduling: Scheduling | None, seed: int = 0, most: int = 64) -> list[Served]:
    """Serves a load; the scheduler's clock and the requests' is what the steps take."""
    clock, rng = _Clock(), np.random.default_rng(seed)
    group = CacheGroup("full", (0,), 1, 1, 1, block_size=BLOCK)
    config = SchedulerConfig(
        most, scheduling=scheduling, prefill_tokens=2048 if scheduling and scheduling.offline else 512
    )
    caps = ExecutorCaps(shared_blocks=True)
    scheduler = ContinuousScheduler(config, caps, [group], {"full": BLOCKS}, clock)
    arrivals, found = iter(load), []
    following = next(arrivals, None)
    of: dict[Request, Arrival] = {}
    prompts = [0] * 2048
    while following is not None or scheduler.has_work():
        if not scheduler.has_work() and following is not None:
            clock.now = max(clock.now, following.at)
        while following is not None and following.at <= clock.now:
            request = _request(following, prompts, scheduling, clock)
            try:
                scheduler.add(request)
                of[request] = following
            except EnginewrightError as e:
                retry = e.retry_after if isinstance(e, OverloadError) else None
                found.append(Served(following, None, None, clock.now, retry))
            following = next(arrivals, None)
        if not scheduler.has_work():
            continue
        batch = scheduler.schedule()
        clock.now += seconds(StepSize.from_chunks(batch.chunks)) * (1 + 0.05 * rng.standard_normal())
        tokens = [
            END if chunk.request.output_length + 1 >= of[chunk.request].answer else 0
            for chunk in batch.chunks
            if chunk.rows
        ]
        scheduler.prepare_next(batch)
        output = StepOutput(tokens=np.array(tokens, np.int32))
        for request in scheduler.commit(batch, output):
            if request.finished:
                found.append(_served(of.pop(request), request, clock.now))
    assert len(found) == len(load), "every request has ended"
    assert all(pool.free_blocks == pool.total_blocks for pool in scheduler.pools.values()), "no block is lost"
    return found


def _request(arrival: Arrival, prompts: list[int], scheduling: Scheduling | None, clock: _Clock) -> Request:
    options: dict[str, Any] = {}
    if scheduling is not None and arrival.of_class in scheduling.classes:
        options["request_class"] = scheduling.class_named(arrival.of_class)
    made = Generation(
        prompts[: arrival.prompt], PARAMS, end_token_ids=(END,), tenant=arrival.tenant, clock=clock, **options
    )
    made.queued = arrival.at  # a step was running
    return made


def _served(arrival: Arrival, request: Request, now: float) -> Served:
    assert request.token_times is not None
    first, last = request.token_times
    each = (last - first) / (request.output_length - 1) if request.output_length > 1 else None
    return Served(arrival, first - request.queued, each, now)


def summary(served: Iterable[Served], targets: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Says of each class: share within its targets, times, and how many within them a second (goodput).

    ``targets``: class -> time to the first token, time for each further one.
    """
    served = list(served)
    span = max(s.ended for s in served) - min(s.arrival.at for s in served)
    found: dict[str, Any] = {"requests": len(served), "seconds": span}
    for name in sorted({s.arrival.of_class for s in served}):
        of = [s for s in served if s.arrival.of_class == name]
        done = [s for s in of if s.first is not None]
        row: dict[str, Any] = {"requests": len(of), "refused": 1 - len(done) / len(of)}
        row |= {f"ttft_{key}": value for key, value in _spread([s.first for s in done if s.first is not None]).items()}
        row |= {f"tpot_{key}": value for key, value in _spread([s.token for s in done if s.token is not None]).items()}
        row["end_to_end_p50"] = float(np.median([s.ended - s.arrival.at for s in done]))
        if name in targets:
            ttft, tpot = targets[name]
            good = sum(s.first is not None and s.first <= ttft and (s.token or 0) <= tpot for s in done)
            row |= {"within": good / len(of), "within_of_served": good / len(done), "goodput": good / span}
        found[name] = row
    found["tokens_per_second"] = sum(s.arrival.answer for s in served if s.first is not None) / span
    return found


def by_tenant(served: Iterable[Served]) -> dict[str, Any]:
    """Says of each tenant: requests, and times to the first token."""
    tenants: dict[str, list[float]] = {}
    for s in served:
        if s.first is not None:
            tenants.setdefault(s.arrival.tenant, []).append(s.first)
    return {name: {"requests": len(of)} | _spread(of) for name, of in sorted(tenants.items())}


def _spread(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99]) if len(values) else (float("nan"),) * 2
    return {"p50": float(p50), "p99": float(p99)}
