"""A slot keeps its tokens for a request that goes on behind them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.requests.request import Generation, PromptRequest, Request
from enginewright.runtime.requests.request_options import RequestOptions
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.contracts import ExecutorCaps

CAPS = ExecutorCaps(ragged=False, max_requests=8, kept_slots=True)


def engine_of(toy: Any, slots: int = 2, **config: Any) -> Engine:
    executor = toy(blocks=slots, block_size=64, groups=2, caps=CAPS)
    return Engine(executor, SchedulerConfig(**({"prefix_cache": True} | config)))


def ask(prompt: list[int], new: int = 4, tenant: str = "") -> Request:
    options = RequestOptions(tenant)
    return Generation(prompt, SamplingParams(max_tokens=new, ignore_eos=True), options=options)


def run(engine: Engine, *requests: Request) -> list[list[int]]:
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        engine.step()
        check(engine)
    return [request.tokens[request.prompt_length :] for request in requests]


def check(engine: Engine) -> None:
    kept_of = getattr(engine.scheduler.cache.prefixes, "kept", {})
    held = [request.tables for request in engine.scheduler.running if request.tables]
    slots = [tables["g0"][0] for tables in held]
    assert all(len(tables[name]) == 1 and tables[name][0] == tables["g0"][0] for tables in held for name in tables)
    assert len(set(slots)) == len(slots)
    for name, pool in engine.pools.items():
        assert sorted(slots) == [slot for slot in range(pool.total_blocks) if pool.holders(slot)]
        assert pool.kept_blocks == len(kept_of)
        memory = engine.executor.memory[name].reshape(pool.total_blocks, -1)  # type: ignore[attr-defined]
        for slot, tokens in kept_of.items():
            assert memory[slot, : len(tokens.items)].tolist() == tokens.items
            assert not pool.holders(slot)


def alone(toy: Any, request: Request) -> list[int]:
    engine = engine_of(toy, prefix_cache=False)
    again = Generation(request.tokens[: request.prompt_length], request.params)
    engine.add_request(again)
    while engine.has_work():
        engine.step()
    engine.executor.close()
    return again.tokens[again.prompt_length :]


def test_a_conversation_goes_on_where_it_sat(toy: Any) -> None:
    engine = engine_of(toy)
    first = ask([1, 2, 3, 4, 5])
    [answer] = run(engine, first)
    second = ask([1, 2, 3, 4, 5, *answer, 9])
    assert run(engine, second) == [alone(toy, second)]
    assert (first.cached_tokens, second.cached_tokens) == (0, 5 + 3)
    assert engine.scheduler.cache.use.reused == 8


def test_the_slot_that_shares_most_is_taken(toy: Any) -> None:
    engine = engine_of(toy, slots=3)
    run(engine, ask([1, 2, 3, 4, 5, 6]), ask([1, 2, 3, 9, 9, 9]))
    request = ask([1, 2, 3, 9, 9, 8])
    assert run(engine, request) == [alone(toy, request)]
    assert request.cached_tokens == 5


def test_who_shares_little_leaves_a_slot_alone(toy: Any) -> None:
    engine = engine_of(toy)
    long = list(range(20, 50))
    run(engine, ask(long))
    run(engine, other := ask([20, 21, 7, 7, 7, 7]))
    run(engine, again := ask([*long, 3]))
    assert (other.cached_tokens, again.cached_tokens) == (0, 30)


def test_a_tenant_a_failure_and_a_prompt_that_is_scored(toy: Any) -> None:
    engine = engine_of(toy, slots=4)
    engine.executor.poison = 77  # type: ignore[attr-defined]
    run(engine, ask([1, 2, 3, 4], tenant="a"), ask([5, 6, 77, 8]))
    requests = [ask([1, 2, 3, 4], tenant="b"), ask([5, 6, 7, 8]), ask([1, 2, 3, 4], tenant="a")]
    requests.append(PromptRequest([1, 2, 3, 4], ("logits",), lambda start, rows: None, options=RequestOptions("a")))
    for request in requests:
        run(engine, request)
    assert [request.cached_tokens for request in requests] == [0, 0, 3, 0]
    assert engine.scheduler.cache.forget("a") == 0
    run(engine, again := ask([1, 2, 3, 4], tenant="a"))
    assert again.cached_tokens == 0


@pytest.mark.parametrize("seed", range(3))
def test_any_course_of_events(toy: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    engine = engine_of(toy, slots=int(rng.integers(1, 5)), max_requests=4, prefill_tokens=int(rng.integers(2, 20)))
    seen: Counter[str] = Counter()
    known, requests = [[1, 2, 3]], []
    for _ in range(300):
        if len(requests) < 8 and rng.random() < 0.4:
            beginning = known[int(rng.integers(len(known)))]
            prompt = beginning[: int(rng.integers(1, 40))] + rng.integers(0, 5, rng.integers(1, 5)).tolist()
            requests.append(ask(prompt[:50], int(rng.integers(1, 10)), tenant=f"t{int(rng.integers(2))}"))
            engine.add_request(requests[-1])
        if requests and rng.random() < 0.03:
            engine.abort(requests[int(rng.integers(len(requests)))])
        if engine.has_work():
            engine.step()
        check(engine)
        for request in [request for request in requests if request.finished]:
            requests.remove(request)
            seen[request.finish_reason or ""] += 1
            seen["hits"] += bool(request.cached_tokens)
            if request.finish_reason == "length":
                assert request.tokens[request.prompt_length :] == alone(toy, request)
                known = [*known[-5:], request.tokens]
    assert seen["length"] > 20 and seen["hits"] > 5, seen
    engine.executor.close()
