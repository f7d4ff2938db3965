"""Tokens do not depend on the batch, chunks or preemption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.requests.request import Generation, PromptRequest, Request
from enginewright.runtime.requests.request_options import RequestOptions
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.scheduler.options import Scheduling
from enginewright.runtime.shared.contracts import ExecutorCaps

Toy = Callable[..., Any]


def requests(count: int, longest: int = 30) -> list[Request]:
    rng = np.random.default_rng(1)
    return [
        Generation(
            rng.integers(0, 256, rng.integers(1, longest)).tolist(),
            SamplingParams(max_tokens=int(rng.integers(1, 20)), temperature=float(i % 2), seed=i),
        )
        for i in range(count)
    ]


def run(engine: Engine, made: list[Request]) -> list[list[int]]:
    for request in made:
        engine.add_request(request)
    while engine.has_work():
        engine.step()
    return [r.tokens for r in made]


def alone(toy: Toy, made: list[Request]) -> list[list[int]]:
    return [run(Engine(toy(), SchedulerConfig()), [request])[0] for request in made]


def test_two_hundred_requests_on_a_pool_far_too_small(toy: Toy) -> None:
    executor = toy(blocks=24)  # 96 tokens; the requests need about 5000
    engine = Engine(executor, SchedulerConfig(max_requests=16, prefill_tokens=32))
    generations = requests(200)
    assert run(engine, generations) == alone(toy, requests(200))
    assert all(r.finish_reason == "length" and r.output_length == r.params.max_tokens for r in generations)
    assert engine.preemptions > 20
    assert engine.pools["g0"].free_blocks == 24


@pytest.mark.parametrize("config", [{"prefill_tokens": 5}, {"prefill_chunk": 3}, {"max_requests": 2}, {}])
@pytest.mark.parametrize("groups", [1, 2])
def test_tokens_do_not_depend_on_company_and_chunks(toy: Toy, config: dict[str, int], groups: int) -> None:
    engine = Engine(toy(blocks=200, groups=groups), SchedulerConfig(**config))
    expected = [run(Engine(toy(groups=groups), SchedulerConfig()), [r])[0] for r in requests(20)]
    assert run(engine, requests(20)) == expected


def test_an_executor_of_one_phase(toy: Toy) -> None:
    engine = Engine(toy(caps=ExecutorCaps(ragged=False)), SchedulerConfig(prefill_tokens=16))
    assert run(engine, requests(20)) == alone(toy, requests(20))


def test_the_toy_notices_a_wrong_table(toy: Toy) -> None:
    """The tests above can fail: a block table that is off by one gives other tokens."""
    generations, right = requests(4), alone(toy, requests(4))
    executor = toy()
    submit = executor.submit

    def wrong(step: Any) -> Any:
        step.arrays["block_table:g0"] = step.block_tables["g0"][::-1].copy()
        return submit(step)

    executor.submit = wrong
    executor._check = lambda step: None
    assert run(Engine(executor, SchedulerConfig()), generations) != right


def test_steps_return_who_advanced(toy: Toy) -> None:
    engine = Engine(toy(), SchedulerConfig(prefill_tokens=4))
    short, long = Generation([1], SamplingParams(max_tokens=2)), Generation(range(9), SamplingParams(max_tokens=1))
    engine.add_request(short)
    engine.add_request(long)
    assert [engine.step() for _ in range(3)] == [[short], [short], [long]]
    engine.add_request(short := Generation([1], SamplingParams()))
    engine.abort(short)
    engine.add_request(Generation([1], SamplingParams()))
    engine.abort_all()
    assert not engine.has_work()


@pytest.mark.parametrize("config", [{}, {"prefill_tokens": 5}])
def test_a_request_whose_logits_cannot_be_sampled_ends_alone(toy: Toy, config: dict[str, int]) -> None:
    poison = 300  # the toy takes any token
    executor = toy(blocks=60)
    executor.poison = poison
    engine = Engine(executor, SchedulerConfig(**config))
    generations = requests(20)
    at = {3: 0, 8: 1, 15: 5}
    generations += [Generation([*range(n), poison, 7], SamplingParams(max_tokens=9)) for n in at.values()]
    scored = PromptRequest([1, 2, poison], ("logits",), lambda start, rows: None)
    assert run(engine, [*generations, scored])[:20] == alone(toy, requests(20))
    for request in generations[20:]:
        assert (request.finish_reason, request.output_length) == ("error", 0)
        assert request.to_output().error is request.error is not None
    assert scored.error is not None and "logits at token 2 of its prompt" in str(scored.error)
    assert all(request.error is None for request in generations[:20])
    assert engine.pools["g0"].free_blocks == 60


@pytest.mark.parametrize("company", [0, 5])
@pytest.mark.parametrize("tokens_a_step", [3, 16, 512])
def test_a_prompt_that_fails_has_the_log_probabilities_before(toy: Toy, tokens_a_step: int, company: int) -> None:
    """Whatever its chunks were, and who was there: those of the tokens up to the one that fails, which is named."""
    executor = toy(blocks=80)
    executor.poison = 300
    engine = Engine(executor, SchedulerConfig(prefill_tokens=tokens_a_step))
    prompt = [*range(1, 31), 300, *range(31, 41)]
    request = Generation(prompt, SamplingParams(max_tokens=5, prompt_logprobs=2))
    run(engine, [*requests(20)[:company], request])
    output = request.to_output()
    assert output.finish_reason == "error" and "at token 30 of its prompt" in str(output.error)
    assert output.prompt_logprobs is not None
    assert [None if one is None else one.token_id for one in output.prompt_logprobs] == [
        *(None, *prompt[1:31]),
        *[None] * 10,
    ]


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_blocks_stay_with_who_has_ended_until_its_step_has_run(toy: Toy, how: str) -> None:
    """The step still writes to them, while blocks read from disk for their next owner are written at once."""
    engine = Engine(toy(caps=ExecutorCaps(in_flight=2)), SchedulerConfig())
    one, other = (Generation([*range(first, first + 6)], SamplingParams(max_tokens=9)) for first in (5, 50))
    engine.add_request(one)
    engine.step()
    engine.add_request(other)
    free = engine.pools["g0"].free_blocks
    if how == "abort":
        engine.abort(one)
    else:
        engine.fail(one, ValueError("no"))
    assert one.finished and engine.has_work() and engine.pools["g0"].free_blocks == free
    while engine.has_work():
        engine.step()
    assert engine.pools["g0"].free_blocks == 64 and engine.steps_in_flight == 0
    assert other.tokens == alone(toy, [Generation([*range(50, 56)], SamplingParams(max_tokens=9))])[0]


def test_a_step_in_flight_ends_where_nobody_is_left(toy: Toy) -> None:
    engine = Engine(toy(caps=ExecutorCaps(in_flight=2)), SchedulerConfig())
    engine.add_request(one := Generation([5, 6, 7], SamplingParams(max_tokens=9)))
    engine.step()
    engine.abort(one)
    while engine.has_work():
        assert engine.step() == []
    assert engine.pools["g0"].free_blocks == 64 and engine.steps_in_flight == 0


CHAINS = ExecutorCaps(in_flight=2, chains=True)


@pytest.mark.parametrize("count", [1, 5])
def test_a_step_follows_one_in_flight_and_has_all_its_requests(toy: Toy, count: int) -> None:
    """The last step of a request that the token of an earlier step has ended computes that token in vain."""
    params = SamplingParams(max_tokens=20)
    generations = [Generation([first, 7, 9], params) for first in range(count)]
    plain = [alone(toy, [Generation([first, 7, 9], params)])[0] for first in range(count)]
    if count > 1:  # the first one ends early
        end = plain[0][10]
        generations[0] = Generation([0, 7, 9], SamplingParams(max_tokens=20, stop_token_ids=[end]))
        plain[0] = plain[0][: plain[0].index(end, 3) + 1]
    engine = Engine(toy(caps=CHAINS), SchedulerConfig(prefix_cache=False))
    for request in generations:
        engine.add_request(request)
    flying, submit = [], engine.executor.submit
    engine.executor.submit = lambda step: flying.append(engine.steps_in_flight) or submit(step)  # type: ignore[method-assign,func-returns-value]
    while engine.has_work():
        engine.step()
    assert [request.tokens for request in generations] == plain
    steps = engine.executor.steps  # type: ignore[attr-defined]
    assert len(steps) == 20 and flying == [0, *[1] * 19]
    decoded = sum(len(step.ids) for step in steps[1:])
    assert decoded == sum(len(tokens) - 4 for tokens in plain) + (count > 1)
    assert engine.pools["g0"].free_blocks == 64 and not engine.scheduler.queues.in_flight


def test_requests_that_need_their_tokens_on_the_host_wait_for_them(toy: Toy) -> None:
    """A step has the others meanwhile, also those whose rules depend on the number of their tokens."""
    plain, counted = SamplingParams(max_tokens=12, min_tokens=9), SamplingParams(max_tokens=12, repetition_penalty=1.5)
    generations = [Generation([first, 7, 9], params) for first, params in enumerate((plain, counted))]
    expected = [alone(toy, [Generation(list(request.tokens), request.params)])[0] for request in generations]
    engine = Engine(toy(caps=CHAINS), SchedulerConfig())
    for request in generations:
        engine.add_request(request)
    while engine.has_work():
        engine.step()
    assert [request.tokens for request in generations] == expected
    sizes = [len(step.ids) for step in engine.executor.steps[1:]]  # type: ignore[attr-defined]
    assert sizes[:4] == [1, 2, 1, 2]


def test_prefixes_of_a_request_are_found_although_its_last_step_was_in_vain(toy: Toy) -> None:
    """Its blocks needn't be cleared for their next owner, as a finite row of that step follows all its keys."""
    cached = []
    for caps in (ExecutorCaps(), CHAINS):
        engine = Engine(toy(20, 4, windows=(0,), caps=caps), SchedulerConfig(prefix_cache=True))
        end = alone(toy, [Generation([*range(20)], SamplingParams(max_tokens=9))])[0][-1]
        first = Generation([*range(20)], SamplingParams(max_tokens=30, stop_token_ids=[end]))
        run(engine, [first])
        assert first.finish_reason == "stop"
        again = Generation([*first.tokens, 7], SamplingParams(max_tokens=2))
        run(engine, [again])
        cached.append(again.cached_tokens)
        run(engine, [Generation([*range(100, 170)], SamplingParams(max_tokens=3))])
        assert not any(step.clears for step in engine.executor.steps)  # type: ignore[attr-defined]
    assert cached[0] == cached[1] == 4 * (len(first.tokens) // 4)


def test_requests_in_flight_are_preempted_newest_first_for_older_ones(toy: Toy) -> None:
    """The newest one first stays out of a step, as a request in flight keeps its blocks."""
    engine = Engine(toy(10, 4, caps=CHAINS), SchedulerConfig())
    generations = [Generation([first, 8, 9], SamplingParams(max_tokens=30)) for first in range(3)]
    ended: list[int] = []
    for request in generations:
        engine.add_request(request)
    while engine.has_work():
        engine.step()
        ended += [i for i, one in enumerate(generations) if one.finished and i not in ended]
    assert ended == [0, 1, 2] and engine.preemptions > 0


def test_a_request_of_a_higher_priority_takes_the_place_of_one_in_flight(toy: Toy) -> None:
    engine = Engine(toy(caps=CHAINS), SchedulerConfig(max_requests=2, scheduling=Scheduling()))
    low = [
        Generation([first, 8, 9], SamplingParams(max_tokens=40), options=RequestOptions(priority=5))
        for first in range(2)
    ]
    for request in low:
        engine.add_request(request)
    for _ in range(5):
        engine.step()
    engine.add_request(high := Generation([50, 51], SamplingParams(max_tokens=3)))
    while not high.finished:
        engine.step()
    assert not any(request.finished for request in low) and engine.preemptions == 1


def test_a_request_waits_for_a_prefix_that_a_step_in_flight_computes(toy: Toy) -> None:
    reused = []
    for caps in (ExecutorCaps(), CHAINS):
        engine = Engine(toy(64, 4, windows=(0,), caps=caps), SchedulerConfig(prefix_cache=True))
        engine.add_request(first := Generation([*range(20)], SamplingParams(max_tokens=4)))
        engine.step()
        run(engine, [second := Generation([*range(16), 50], SamplingParams(max_tokens=4))])
        assert first.finished
        reused.append(second.cached_tokens)
    assert reused == [16, 16]


@pytest.mark.parametrize("seed", range(3))
def test_steps_in_flight_give_the_tokens_of_one_at_a_time(toy: Toy, seed: int) -> None:
    """Prompts come in chunks, blocks are few, requests end at any token or are aborted, and prefixes are found."""
    tokens, counts = [], Counter[str]()
    for caps in (ExecutorCaps(), CHAINS):
        random = np.random.default_rng(seed)
        executor = toy(24, 4, windows=(0, 8) if seed == 1 else (0,), caps=replace(caps, max_tokens=16))
        engine = Engine(executor, SchedulerConfig(6, 16, prefix_cache=True))
        requests: list[Generation] = []
        for _ in range(60):
            prompt = [*range(int(random.integers(1, 14))), *random.integers(0, 200, random.integers(1, 30)).tolist()]
            ends = random.integers(0, 256, 20).tolist()
            params = SamplingParams(max_tokens=int(random.integers(1, 30)), stop_token_ids=ends)
            requests.append(Generation(prompt, params))
        aborted = set(random.choice(60, 5, replace=False).tolist())
        waiting, steps = list(enumerate(requests)), 0
        while engine.has_work() or waiting:
            steps += 1
            if waiting and steps % 3 == 0:
                number, request = waiting.pop(0)
                engine.add_request(request)
                if number in aborted:
                    engine.step()
                    engine.abort(request)
            if engine.has_work():
                engine.step()
            counts["flying"] += engine.steps_in_flight
        tokens.append([r.tokens for number, r in enumerate(requests) if number not in aborted])
        counts["preempted"] += engine.preemptions
        pools = engine.pools.values()
        assert all(pool.free_blocks == pool.total_blocks for pool in pools) and not engine.scheduler.queues.leaving
        counts["hits"] += sum(bool(request.cached_tokens) for request in requests)
    assert tokens[0] == tokens[1]
    assert min(counts.values()) > 0 and len(counts) == 3


@pytest.mark.parametrize("in_flight", [2, 3])
@pytest.mark.parametrize("count", [1, 2, 6, 7])
def test_requests_that_begin_together_are_shared_among_the_steps_in_flight(
    toy: Toy, in_flight: int, count: int
) -> None:
    """They decode in one phase: each step takes its share, so that the others overlap with it."""
    engine = Engine(toy(caps=ExecutorCaps(in_flight=in_flight)), SchedulerConfig())
    generations = [Generation([first, 7, 9], SamplingParams(max_tokens=20)) for first in range(count)]
    for request in generations:
        engine.add_request(request)
    flying, submit = [], engine.executor.submit
    engine.executor.submit = lambda step: flying.append(engine.steps_in_flight) or submit(step)  # type: ignore[method-assign,func-returns-value]
    while engine.has_work():
        engine.step()
    sizes = [len(step.q_start) - 1 for step in engine.executor.steps]  # type: ignore[attr-defined]
    assert sizes[0] == count and max(sizes[1:]) == -(-count // in_flight)
    assert flying.count(min(count, in_flight) - 1) >= 0.8 * len(flying), "others run already"
    alone_ = [alone(toy, [Generation([first, 7, 9], SamplingParams(max_tokens=20))])[0] for first in range(count)]
    assert [request.tokens for request in generations] == alone_
