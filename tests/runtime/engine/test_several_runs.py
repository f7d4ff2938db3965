"""Steps that run several times before the host sees their tokens: the tokens are those of one run a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.requests.lookup import OwnText, PastAnswers
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.scheduler.options import Scheduling
from enginewright.runtime.shared.contracts import ExecutorCaps

Toy = Callable[..., Any]
RUNS = ExecutorCaps(most_runs=8, shared_blocks=True)
LONG = 1e9
"""Seconds in which as many runs fit as an executor takes."""


def alone(toy: Toy, request: Generation, **options: Any) -> list[int]:
    """The tokens of a copy of the request that runs alone, once a step."""
    engine = Engine(toy(200, **options), SchedulerConfig())
    one = Generation(request.tokens[: request.prompt_length], request.params)
    engine.add_request(one)
    while engine.has_work():
        engine.step()
    return one.tokens


def random_generation(rng: np.random.Generator) -> Generation:
    """A request whose tokens mostly depend on nothing that the host knows."""
    params = SamplingParams(
        max_tokens=int(rng.integers(1, 40)),
        temperature=float(rng.integers(0, 2)),
        seed=int(rng.integers(1 << 32)),
        stop_token_ids=rng.integers(0, 256, 12).tolist() if rng.random() < 0.5 else [],
        repetition_penalty=1.5 if rng.random() < 0.03 else 1.0,
        logprobs=1 if rng.random() < 0.03 else None,
    )
    return Generation(rng.integers(0, 256, rng.integers(1, 20)).tolist(), params)


@pytest.mark.parametrize("heedless", [False, True])
@pytest.mark.parametrize("windows", [(0,), (0, 6)])
@pytest.mark.parametrize("blocks", [200, 25])
def test_tokens_are_those_of_one_run_a_step(toy: Toy, blocks: int, windows: tuple[int, ...], heedless: bool) -> None:
    """Requests come, go, are aborted, and are preempted in the small pool; some continue the texts of others."""
    rng = np.random.default_rng(blocks + len(windows))
    executor = toy(blocks, windows=windows, caps=RUNS, heedless=heedless)
    scheduling = Scheduling(fair=True) if heedless else None
    engine = Engine(executor, SchedulerConfig(6, 16, prefix_cache=True, runs_seconds=LONG, scheduling=scheduling))
    running, ended = list[Generation](), list[Generation]()
    for turn in range(400):
        if turn < 300 and len(running) < 6 and rng.random() < 0.3:
            request = random_generation(rng)
            if ended and rng.random() < 0.5:  # a part of a text that was computed
                tokens = ended[int(rng.integers(len(ended)))].tokens[:50]
                request = Generation(tokens[: int(rng.integers(1, len(tokens) + 1))], request.params)
            running.append(request)
            engine.add_request(request)
        if running and rng.random() < 0.02:
            engine.abort(running[int(rng.integers(len(running)))])
        if engine.has_work():
            engine.step()
        for request in [one for one in running if one.finished]:
            running.remove(request)
            ended.append(request)
            whole = alone(toy, request, windows=windows)
            assert request.tokens == (whole[: len(request.tokens)] if request.finish_reason == "abort" else whole)
    assert not running and len(ended) > 20
    assert sum(executor.runs) > 2 * len(executor.runs) > 20
    assert (engine.preemptions > 0) == (blocks == 25)
    assert engine.scheduler.cache.use.reused > 0
    assert all(pool.free_blocks == pool.total_blocks for pool in engine.pools.values())


def test_a_run_is_no_longer_than_its_seconds(toy: Toy) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-3  # several times a step
        return now[0]

    def mean_runs(seconds: float) -> float:
        executor = toy(caps=RUNS)
        engine = Engine(executor, SchedulerConfig(runs_seconds=seconds), clock=clock)
        engine.add_request(Generation([5, 6], SamplingParams(max_tokens=33)))
        while engine.has_work():
            engine.step()
        return len(executor.steps) / (len(executor.steps) - sum(executor.runs) + len(executor.runs))

    assert mean_runs(0.0) == mean_runs(1e-3) == 1
    assert 1 < mean_runs(4e-3) < mean_runs(1.0)


@pytest.mark.parametrize(
    "option", [{"logprobs": 0}, {"repetition_penalty": 1.5}, {"min_tokens": 9}, {"num_beams": 2, "temperature": 0}]
)
def test_what_needs_the_host_runs_once(toy: Toy, option: dict[str, Any]) -> None:
    executor = toy(caps=RUNS)
    engine = Engine(executor, SchedulerConfig(runs_seconds=LONG))
    params = SamplingParams(max_tokens=12, **option)
    generations = [Generation([5, 6], SamplingParams(max_tokens=12)), Generation([7, 8], params)]
    if params.num_beams > 1:
        from enginewright.runtime.requests.request import BeamSearch

        BeamSearch.begin(generations[1], 260)
    for request in generations:
        engine.add_request(request)
    while not any(request.finished for request in generations):
        engine.step()
    assert executor.runs == []


def test_nothing_runs_ahead_of_a_request_that_waits(toy: Toy) -> None:
    executor = toy(caps=RUNS)
    engine = Engine(executor, SchedulerConfig(max_requests=1, runs_seconds=LONG))
    for first in (5, 50):
        engine.add_request(Generation([first, 6], SamplingParams(max_tokens=12)))
    while engine.scheduler.waiting:
        engine.step()
    assert executor.runs == []
    while engine.has_work():
        engine.step()
    assert executor.runs == [8, 3]


def test_a_row_of_nan_ends_its_request_and_the_runs(toy: Toy) -> None:
    """The others go on; nothing of the blocks that may hold NaN is found or left uncleared."""
    params = SamplingParams(max_tokens=30)
    requests = [Generation([first, 7, 9], params) for first in range(3)]
    plain = [alone(toy, request, windows=(0,)) for request in requests]
    poison = next(t for t in plain[0][6:] if all(t not in p[:30] for p in plain[1:]) and t not in plain[0][:6])
    executor = toy(200, windows=(0,), caps=RUNS)
    executor.poison = poison
    engine = Engine(executor, SchedulerConfig(prefix_cache=True, runs_seconds=LONG))
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        engine.step()
    assert requests[0].finish_reason == "error"
    assert requests[0].tokens == plain[0][: plain[0].index(poison) + 1]
    assert [one.tokens for one in requests[1:]] == plain[1:] and executor.runs


def test_drafts_are_still_looked_for(toy: Toy) -> None:
    """A step runs once where the proposers are asked; they are asked less often while they find nothing."""
    caps = ExecutorCaps(most_runs=8, shared_blocks=True, verifies=True)

    def steps(runs_seconds: float) -> tuple[list[int], int, list[int]]:
        executor = toy(200, caps=caps, windows=(8,))  # whose tokens repeat after some time
        config = SchedulerConfig(speculate=True, runs_seconds=runs_seconds)
        engine = Engine(executor, config, [OwnText(), PastAnswers()])
        engine.add_request(request := Generation([*range(20), *range(20)], SamplingParams(max_tokens=300)))
        while engine.has_work():
            engine.step()
        return request.tokens, request.accepted, executor.runs

    plain, several = steps(0.0), steps(LONG)
    assert plain[0] == several[0]
    assert several[2] and plain[2] == []
