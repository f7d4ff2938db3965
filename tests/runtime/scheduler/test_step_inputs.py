"""Arrays that follow from the last step's are those that would be made anew."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.requests.request import Generation, Request
from enginewright.runtime.requests.request_options import RequestOptions
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler import step_inputs
from enginewright.runtime.scheduler.base import Batch, Chunk, step_input
from enginewright.runtime.scheduler.continuous import ContinuousScheduler
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.scheduler.options import Scheduling
from enginewright.runtime.scheduler.step_inputs import StepInputs
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps, StepInput, StepOutput

GROUPS = {"g": CacheGroup("g", (0,), 1, 1, 1, block_size=4), "h": CacheGroup("h", (1,), 1, 1, 1, block_size=8)}


def assert_same(found: StepInput, expected: StepInput) -> None:
    """Block tables may have more columns than they need, of no block."""
    for name in ("ids", "positions", "q_start", "kv_len", "rows"):
        one, other = getattr(found, name), getattr(expected, name)
        np.testing.assert_array_equal(one, other, err_msg=name)
        assert one.dtype == other.dtype == np.int32, name
    for name, table in expected.block_tables.items():
        np.testing.assert_array_equal(found.slots[name], expected.slots[name], err_msg=name)
        for one, other, length in zip(found.block_tables[name], table, expected.kv_len.tolist(), strict=True):
            used = -(-length // GROUPS[name].block_size)
            np.testing.assert_array_equal(one[:used], other[:used], err_msg=name)
    assert (found.sampling is None) == (expected.sampling is None)
    if found.sampling is not None and expected.sampling is not None:
        for name, value in vars(expected.sampling).items():
            np.testing.assert_array_equal(getattr(found.sampling, name), value, err_msg=name)
            assert np.asarray(getattr(found.sampling, name)).dtype == np.asarray(value).dtype, name
    assert found.outputs == expected.outputs


@pytest.mark.parametrize("blocks", [200, 30])
def test_steps_of_a_scheduler(toy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """Requests that come and go, are preempted in the small pool, and decode for long in between."""
    anew: list[int] = []

    def counted(chunks: Any, *rest: Any) -> StepInput:
        anew.append(len(chunks))
        return step_input(chunks, *rest)

    monkeypatch.setattr(step_inputs, "step_input", counted)
    executor = toy(blocks)
    scheduler = ContinuousScheduler(
        SchedulerConfig(prefill_tokens=16), executor.caps, executor.cache_groups, executor.blocks
    )
    monkeypatch.setitem(GROUPS, "g0", executor.cache_groups[0])
    random = np.random.default_rng(blocks)
    waiting = [
        Generation(
            range(int(random.integers(1, 20))),
            SamplingParams(
                max_tokens=int(random.integers(2, 40)),
                temperature=0.5,
                seed=seed,
                logprobs=(None, 0, 1)[seed % 3],
                repetition_penalty=(1.0, 1.2)[seed % 2],
            ),
        )
        for seed in range(12)
    ]
    steps = 0
    while waiting or scheduler.has_work():
        if waiting and steps % 7 == 0:
            scheduler.add(waiting.pop())
        batch = scheduler.schedule()
        assert_same(batch.step, step_input(batch.chunks, scheduler.groups))
        scheduler.prepare_next(batch)
        scheduler.commit(batch, executor.run(batch.step))
        steps += 1
    assert len(anew) < steps / 2
    assert (scheduler.preemptions > 0) == (blocks == 30)


def decodes(*lengths: int) -> list[Request]:
    """Requests that lack one token, with blocks enough."""
    requests = []
    for first, length in enumerate(lengths):
        one = Generation(range(10, 10 + length), SamplingParams(max_tokens=50))
        one.tables = {name: array("i", range(40 * first, 40 * first + 40)) for name in GROUPS}
        one.computed = length - 1
        requests.append(one)
    return requests


def chunks(requests: list[Request]) -> list[Chunk]:
    return [Chunk(request, request.computed, 1) for request in requests]


def test_what_was_given_out_stays_as_it_was() -> None:
    inputs, requests = StepInputs(GROUPS), decodes(3, 8, 13)
    steps = []
    for token in range(20):
        parts = chunks(requests)
        steps.append((inputs.build(parts), step_input(parts, GROUPS)))
        for request in requests:
            request.computed += 1
            request.accept(token)
    for arrays, expected in steps:
        assert_same(arrays, expected)
    assert steps[1][0].q_start is steps[0][0].q_start


def test_a_step_that_is_scheduled_again() -> None:
    """A failure is followed by such a step: nothing was committed, so nothing has moved."""
    inputs, requests = StepInputs(GROUPS), decodes(3, 8)
    for _ in range(3):
        assert_same(inputs.build(chunks(requests)), step_input(chunks(requests), GROUPS))


def test_others_or_another_order() -> None:
    inputs, requests = StepInputs(GROUPS), decodes(3, 8, 13)
    for order in ([0, 1, 2], [2, 1, 0], [1], [1, 2]):
        some = chunks([requests[b] for b in order])
        assert_same(inputs.build(some), step_input(some, GROUPS))
        for chunk in some:
            chunk.request.computed += 1
            chunk.request.accept(7)


@pytest.mark.parametrize("windows", [None, (0, 6)])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_tables_that_change_between_two_steps(
    toy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, in_flight: int, windows: tuple[int, ...] | None
) -> None:
    """Requests are preempted, aborted and computed again while others are in flight, share blocks and give some back:
    what each step has is what would be made anew, and no block of it is another request's."""
    for seed in range(2):
        random = np.random.default_rng([seed, in_flight])
        executor = toy(10, 16, windows=windows, caps=ExecutorCaps(in_flight=in_flight, shared_blocks=True))
        for group in executor.cache_groups:
            monkeypatch.setitem(GROUPS, group.name, group)
        config = SchedulerConfig(int(random.integers(1, 4)), 16, prefix_cache=True, scheduling=Scheduling())
        scheduler = ContinuousScheduler(config, executor.caps, executor.cache_groups, executor.blocks)
        flying: list[tuple[Batch, StepOutput]] = []
        requests: list[Request] = []
        for _ in range(160):
            if random.integers(5) == 0 and sum(not one.finished for one in requests) < 6:
                prompt = random.integers(0, 2, int(random.integers(1, 20))).tolist()
                params = SamplingParams(max_tokens=int(random.integers(2, 40)))
                requests.append(Generation(prompt, params, options=RequestOptions(priority=int(random.integers(3)))))
                scheduler.add(requests[-1])
            if random.integers(30) == 0 and requests:
                scheduler.abort(requests[int(random.integers(len(requests)))])
            batch = scheduler.schedule() if scheduler.has_work() else None
            if batch is not None:
                assert_same(batch.step, step_input(batch.chunks, scheduler.groups))
                flying.append((batch, executor.run(batch.step)))
                scheduler.prepare_next(batch)
            if flying and (batch is None or len(flying) == in_flight):
                first, output = flying.pop(0)
                if random.integers(12) == 0:
                    scheduler.compute_again(first, {})
                else:
                    scheduler.commit(first, output)
        assert scheduler.preemptions > 0
        for first, output in flying:
            scheduler.commit(first, output)
        for one in requests:
            if one.finish_reason == "length":
                alone = Generation(one.tokens[: one.prompt_length], one.params)
                assert one.tokens == tokens_alone(toy(40, 16, windows=windows), alone), "the tokens that it has alone"


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_a_request_that_was_interrupted_goes_on_with_its_new_blocks(toy: Callable[..., Any], in_flight: int) -> None:
    """With several steps in flight, arrays of a step before it fit its place again: but the block of its last tokens is
    another, to which they were copied."""
    for steps in range(1, 30, 3):
        executor = toy(20, 16, caps=ExecutorCaps(in_flight=in_flight, shared_blocks=True))
        config = SchedulerConfig(max_requests=1, scheduling=Scheduling(), prefix_cache=True)
        scheduler = ContinuousScheduler(config, executor.caps, executor.cache_groups, executor.blocks)
        interrupted = Generation(range(7), SamplingParams(max_tokens=50), options=RequestOptions(priority=1))
        scheduler.add(interrupted)
        flying: list[tuple[Batch, StepOutput]] = []
        for at in range(140):
            if at == steps:
                scheduler.add(
                    Generation(range(20, 60), SamplingParams(max_tokens=1), options=RequestOptions(priority=0))
                )
            batch = scheduler.schedule() if scheduler.has_work() else None
            if batch is not None:
                flying.append((batch, executor.run(batch.step)))
            if flying and (batch is None or len(flying) == in_flight):
                scheduler.commit(*flying.pop(0))
        assert scheduler.preemptions == 1
        assert interrupted.tokens == tokens_alone(toy(40), Generation(range(7), SamplingParams(max_tokens=50)))


def tokens_alone(executor: Any, request: Request) -> list[int]:
    """All tokens of a request that nothing else runs next to."""
    scheduler = ContinuousScheduler(SchedulerConfig(), executor.caps, executor.cache_groups, executor.blocks)
    scheduler.add(request)
    while scheduler.has_work():
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.commit(batch, executor.run(batch.step))
    return request.tokens
