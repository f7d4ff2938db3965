"""Requests that share blocks get the tokens that they get alone, whatever happens; no block is lost or held wrongly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.engine.prefixes import open_tier
from enginewright.runtime.kv_cache import block_pool
from enginewright.runtime.kv_cache.block_pool import DividedPool
from enginewright.runtime.kv_cache.candidate import Candidate
from enginewright.runtime.kv_cache.prefix_index import Node
from enginewright.runtime.requests.block_keys import token_ids
from enginewright.runtime.requests.block_tables import NO_BLOCK
from enginewright.runtime.requests.request import Generation, PromptRequest, Request
from enginewright.runtime.requests.request_options import RequestOptions
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.contracts import ExecutorCaps

WINDOWS = {"full": (0,), "window": (9,), "both": (0, 6, 13), "caps": (0, 1)}


@pytest.fixture(autouse=True)
def _key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def engine_of(toy: Any, *, blocks: int = 64, windows: tuple[int, ...] = (0,), **config: Any) -> Engine:
    return Engine(
        toy(blocks=blocks, block_size=8, windows=windows), SchedulerConfig(**({"prefix_cache": True} | config))
    )


def ask(prompt: list[int], new: int = 4, tenant: str = "", **more: Any) -> Request:
    options = RequestOptions(tenant)
    return Generation(prompt, SamplingParams(max_tokens=new, ignore_eos=True), options=options, **more)


def run(engine: Engine, *requests: Request) -> list[list[int]]:
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        engine.step()
        check(engine)
    return [request.tokens[request.prompt_length :] for request in requests]


def alone(toy: Any, windows: tuple[int, ...], request: Request) -> list[int]:
    """The tokens that a request of the same prompt gets where nothing is shared."""
    plain = engine_of(toy, windows=windows, prefix_cache=False)
    prompt = request.tokens[: request.prompt_length]
    plain.add_request(again := Generation(prompt, request.params, max_tokens=request.max_tokens))
    while plain.has_work():
        plain.step()
    plain.executor.close()
    return again.tokens[again.prompt_length :]


def check(engine: Engine) -> None:
    """Each block is held as often as tables have it, and what can be found has the tokens that it is found by."""
    scheduler, cache, executor = engine.scheduler, engine.scheduler.cache, engine.executor
    assert all(not r.tables and not r.computed for r in scheduler.waiting)
    by_block: list[dict[int, Node]] = [{} for _ in cache.groups]
    nodes = list(cache.index._roots.values()) if cache.index is not None else []
    for node in nodes:
        assert not node.detached
        assert [child.items for child in node.children] == sorted({child.items for child in node.children})
        for child in node.children:
            assert child.parent is node and child.namespace == node.namespace
        nodes += node.children
        for i, block in enumerate(node.blocks):
            if block != NO_BLOCK:
                assert block not in by_block[i], "one block stands for two prefixes"
                by_block[i][block] = node
    if cache.index is not None:
        assert by_block == cache.index._node_of
        users = Counter(id(place.node) for place in getattr(cache.prefixes, "places", {}).values())
        assert all(node.users == users[id(node)] for node in nodes)
    assert set(getattr(cache.prefixes, "places", {})) <= set(scheduler.running)
    for i, (name, pool) in enumerate(engine.pools.items()):
        size = cache.groups[name].block_size
        held = Counter(b for r in scheduler.running for b in r.tables.get(name, ()) if b != NO_BLOCK)
        assert [pool.holders(b) for b in range(pool.total_blocks)] == [held[b] for b in range(pool.total_blocks)]
        parts = pool.parts if isinstance(pool, DividedPool) else [pool]
        blocks = [b * len(parts) + o for o, part in enumerate(parts) for of in part._kept.values() for b in of]
        free = [b * len(parts) + o for o, part in enumerate(parts) for b in part._free]
        assert sorted([*free, *blocks, *held]) == list(range(pool.total_blocks)), "a block is lost"
        for r in scheduler.running:
            table = r.tables.get(name, ())
            for at in range(0, len(table), split := block_pool.SPLIT_TOKENS // size):
                owners = {b % len(parts) for b in table[at : at + split] if b != NO_BLOCK}
                assert len(owners) <= 1, "a split has two owners"
        assert set(blocks) <= set(by_block[i]) <= {*blocks, *held}
        memory = executor.memory[name].reshape(pool.total_blocks, size)  # type: ignore[attr-defined]
        for block, node in by_block[i].items():
            assert memory[block, : len(node.items)].tolist() == token_ids(node.items)


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=list(WINDOWS))
def test_a_prefix_is_found_to_the_token(toy: Any, windows: tuple[int, ...]) -> None:
    engine = engine_of(toy, windows=windows)
    first = ask(list(range(23)))
    run(engine, first)
    assert first.cached_tokens == 0
    for common, reused in ((23, 22), (20, 20), (18, 16), (15, 15), (3, 0)):
        request = ask([*range(common), *[99] * (23 - common)])
        assert run(engine, request) == [alone(toy, windows, request)]
        if 0 in windows and len(windows) == 1:
            assert request.cached_tokens == reused
    use = engine.scheduler.cache.use
    assert use.requests == 6 and use.hits > 0 and use.reused <= use.tokens


def test_an_answer_is_found_by_the_next_question(toy: Any) -> None:
    """The last new token was never computed; what follows it begins there."""
    engine = engine_of(toy)
    first = ask([5, 6, 7], 12)
    (answer,) = run(engine, first)
    second = ask([5, 6, 7, *answer, 1, 2, 3])
    assert run(engine, second) == [alone(toy, (0,), second)]
    assert second.cached_tokens == 3 + 11


def test_requests_that_come_together_compute_their_prefix_once(toy: Any) -> None:
    engine = engine_of(toy, prefill_tokens=16)
    requests = [ask([*range(32), i, i]) for i in range(8)]
    assert run(engine, *requests) == [alone(toy, (0,), request) for request in requests]
    assert [request.cached_tokens for request in requests] == [0] + [32] * 7
    assert sum(len(step.ids) for step in engine.executor.steps) == 32 + 8 * 2 + 8 * 3  # type: ignore[attr-defined]


def test_a_running_request_s_blocks_are_shared(toy: Any) -> None:
    engine = engine_of(toy)
    long, later = ask(list(range(16)), 30), ask([*range(16), 7])
    engine.add_request(long)
    for _ in range(3):
        engine.step()
    engine.add_request(later)
    engine.step()
    assert engine.pools["g0"].shared_blocks == 2
    run(engine)
    assert later.cached_tokens == 16
    assert [r.tokens[r.prompt_length :] for r in (long, later)] == [alone(toy, (0,), r) for r in (long, later)]


def test_a_prompt_that_is_scored_takes_nothing_and_leaves_all(toy: Any) -> None:
    engine = engine_of(toy)
    run(engine, ask(list(range(16))))
    rows: list[int] = []
    prompt = list(range(16))
    scored = PromptRequest(prompt, ("logits",), lambda start, taken: rows.append(len(taken["logits"])))
    run(engine, scored)
    assert (scored.cached_tokens, sum(rows)) == (0, 16)


def test_a_tenant_finds_nothing_of_another_s(toy: Any) -> None:
    engine = engine_of(toy)
    requests = [ask(list(range(16)), tenant=tenant) for tenant in ("one", "two", "one")]
    for request in requests:
        assert run(engine, request) == [alone(toy, (0,), request)]
    assert [request.cached_tokens for request in requests] == [0, 0, 15]


def test_a_tenant_can_t_evict_all_of_another_s(toy: Any) -> None:
    engine = engine_of(toy, blocks=32)
    small = ask(list(range(21)), tenant="small")
    run(engine, small)
    for i in range(40):  # more than the pool, many times over
        run(engine, *(ask([100 + i, *range(30)], 10, tenant="greedy") for _ in range(4)))
    again = ask(list(range(21)), tenant="small")
    run(engine, again)
    assert again.cached_tokens == 20
    lone = engine_of(toy, blocks=32)
    run(lone, ask(list(range(21))))
    for i in range(40):
        run(lone, ask([100 + i, *range(30)], 10))
    run(lone, again := ask(list(range(21))))
    assert again.cached_tokens == 0, "one tenant's oldest prefix is evicted: the test above could fail"


def test_the_oldest_request_may_evict_anything(toy: Any) -> None:
    engine = engine_of(toy, blocks=8)
    run(engine, *(ask([i, *range(8)], tenant=f"t{i}") for i in range(6)))
    long = ask(list(range(50)), 14, tenant="long")
    assert run(engine, long) == [alone(toy, (0,), long)]


@pytest.mark.parametrize("windows", [(9,), (0, 9)])
def test_a_window_s_blocks_stay_few(toy: Any, windows: tuple[int, ...]) -> None:
    """While ten windows' length is generated."""
    engine = engine_of(toy, windows=windows, prefill_tokens=8)
    request = ask(list(range(30)), 90)
    engine.add_request(request)
    group, most = f"g{len(windows) - 1}", 0
    while engine.has_work():
        engine.step()
        check(engine)
        most = max(most, sum(block != NO_BLOCK for block in request.tables.get(group, ())))
    assert most <= (9 + 8) // 8 + 2
    assert request.tokens[30:] == alone(toy, windows, request)


def test_a_request_that_fails_leaves_nothing_of_its_own(toy: Any) -> None:
    """Its blocks are cleared before another gets them; what others hold, or had computed, stays."""
    engine = engine_of(toy)
    run(engine, other := ask([*range(8), 9, 9]))
    engine.executor.poison = 77  # type: ignore[attr-defined]
    bad = ask([*range(8), 77, *range(20)])
    engine.add_request(long := ask([*range(8), 9, 9], 40))
    engine.step()
    engine.add_request(bad)
    run(engine)
    assert bad.finish_reason == "error" and bad.cached_tokens == 8 and long.finish_reason == "length"
    [cleared] = [step.clears for step in engine.executor.steps if step.clears]  # type: ignore[attr-defined]
    assert len(cleared["g0"]) == 3
    engine.executor.poison = None  # type: ignore[attr-defined]
    run(engine, good := ask([*range(8), 77, *range(20)]))
    assert good.cached_tokens == 8 and other.cached_tokens == 0


def test_what_is_read_from_a_disk_is_not_cleared(toy: Any, tmp_path: Path) -> None:
    """Into a block of a request that failed in the step before."""
    engine = engine_of(toy, blocks=4)
    cache = engine.scheduler.cache
    cache.tier = open_tier(engine.executor, cache, tmp_path / "kept")
    run(engine, ask([*range(16), 1]))
    run(engine, *(ask([50 + i, *range(20)]) for i in range(4)))  # evicts it
    cache.tier.flush()
    engine.executor.poison = 77  # type: ignore[attr-defined]
    bad, good = ask([77, *range(30)], 1), ask([*range(16), 2])
    engine.add_request(bad)
    engine.add_request(good)
    run(engine)
    assert bad.finish_reason == "error" and cache.use.from_disk == 16
    assert good.tokens[good.prompt_length :] == alone(toy, (0,), good)
    cache.tier.close()


def test_a_step_that_fails_leaves_nothing_that_was_not_copied(toy: Any) -> None:
    engine = engine_of(toy)
    run(engine, ask(list(range(7))))
    engine.executor.fail = RuntimeError("no")  # type: ignore[attr-defined]
    engine.add_request(ask([*range(7), 8, 9]))
    with pytest.raises(RuntimeError):
        engine.step()
    engine.executor.fail = None  # type: ignore[attr-defined]
    engine.abort_all()
    check(engine)
    later = ask([*range(7), 8, 9, 10])
    assert run(engine, later) == [alone(toy, (0,), later)]


def course(toy: Any, seed: int, steps: int, folder: Path, owners: int = 1) -> Counter[str]:
    """Requests that share beginnings come, are cancelled, fail and are preempted at random, for so many steps.

    In every second course, what is evicted goes to a folder, where some of it gets damaged.
    """
    rng = np.random.default_rng(seed)
    windows = [*WINDOWS.values()][seed % len(WINDOWS)]
    whole = owners * block_pool.SPLIT_TOKENS // 8 if owners > 1 else 1
    engine = engine_of(
        partial(toy, caps=ExecutorCaps(owners=owners)) if owners > 1 else toy,
        blocks=-(-int(rng.integers(7, 30)) // whole) * whole,
        windows=windows,
        max_requests=int(rng.integers(1, 12)),
        prefill_tokens=int(rng.integers(1, 24)),
        prefill_chunk=[None, 5][int(rng.integers(2))],
    )
    engine.executor.poison = 777  # type: ignore[attr-defined]
    cache = engine.scheduler.cache
    if seed % 8 >= 4:
        cache.tier = open_tier(engine.executor, cache, folder / "kept", size=20_000)
    seen: Counter[str] = Counter()
    requests: list[Request] = []
    known: list[list[int]] = [[int(t) for t in rng.integers(0, 5, 40)] for _ in range(3)]
    for _ in range(steps):
        if len(requests) < 24 and rng.random() < 0.35:
            beginning = known[int(rng.integers(len(known)))]
            prompt = beginning[: int(rng.integers(1, 34))] + [int(t) for t in rng.integers(0, 5, rng.integers(0, 6))]
            prompt += [777] * bool(rng.random() < 0.03)
            request = Generation(
                prompt,
                SamplingParams(
                    max_tokens=int(rng.integers(1, 14)), ignore_eos=True, temperature=float(rng.integers(2))
                ),
                options=RequestOptions(f"t{int(rng.integers(2))}"),
            )
            requests.append(request)
            engine.add_request(request)
        if requests and rng.random() < 0.02:
            engine.abort(requests[int(rng.integers(len(requests)))])
        if engine.has_work():
            engine.step()
        check(engine)
        if cache.tier is not None and rng.random() < 0.01:
            cache.tier.flush()
            for path in [*(folder / "kept").glob("*.kv")][:3]:
                path.write_bytes(path.read_bytes()[:-1])
        for request in [request for request in requests if request.finished]:
            requests.remove(request)
            seen[request.finish_reason or ""] += 1
            seen["hits"] += bool(request.cached_tokens)
            if request.finish_reason == "length":
                assert request.tokens[request.prompt_length :] == alone(toy, windows, request)
                known = [*known[-11:], request.tokens]
    engine.executor.steps.clear()  # type: ignore[attr-defined]
    seen["preemptions"], seen["evictions"] = engine.preemptions, sum(p.evictions for p in engine.pools.values())
    seen["copies"], seen["from_disk"] = cache.use.copied_blocks, cache.prefixes.use.from_disk
    if cache.tier is not None:
        seen["refused"] = cache.tier.describe()["disk"]["refused"]
        cache.tier.close()
    while engine.has_work():
        engine.step()
    check(engine)
    engine.executor.close()
    return seen


@pytest.mark.filterwarnings("ignore:prefix cache")
@pytest.mark.parametrize("seed", range(8))
def test_any_course_of_events(toy: Any, seed: int, tmp_path: Path) -> None:
    seen = course(toy, seed, 400, tmp_path)
    events = ["length", "hits", "evictions"] + ["from_disk"] * (seed >= 4)
    assert all(seen[what] for what in events), seen


@pytest.mark.filterwarnings("ignore:prefix cache")
@pytest.mark.parametrize("seed", range(8))
def test_any_course_of_events_with_keys_divided(
    toy: Any, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_pool, "SPLIT_TOKENS", 16)
    seen = course(toy, seed, 250, tmp_path, 2 + seed % 2)
    assert seen["length"] and seen["hits"] and seen["evictions"], seen


def test_splits_are_of_who_has_most_and_stay_with_one_owner(toy: Any) -> None:
    engine = engine_of(partial(toy, caps=ExecutorCaps(owners=4)), blocks=4 * 64 * 2)
    first, second = ask(list(range(1500)), 100), ask([7] * 600, 1)
    engine.add_request(first)
    engine.add_request(second)
    while len(first.tokens) < 1590:
        engine.step()
        check(engine)
    owners = [first.tables["g0"][split * 64] % 4 for split in range(4)]
    assert sorted(owners) == [0, 1, 2, 3], "each of four splits is another rank's"
    assert engine.scheduler.most_cached(10_000) == 4 * 2 * 512
    assert engine.scheduler.most_cached(10_000, sequences=3) == 336, "all may have theirs of one owner"
    engine.executor.close()


def test_a_pool_makes_whole_splits(toy: Any) -> None:
    with pytest.raises(ValueError, match="aren't whole splits of 4 owners"):
        engine_of(partial(toy, caps=ExecutorCaps(owners=4)), blocks=300)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:prefix cache")
@pytest.mark.parametrize("seed", range(8, 32))
def test_any_long_course_of_events(toy: Any, seed: int, tmp_path: Path) -> None:
    seen = course(toy, seed, 5000, tmp_path)
    events = ["length", "error", "abort", "hits", "evictions", "copies"] + ["from_disk", "refused"] * (seed % 8 >= 4)
    assert all(seen[what] for what in events), seen


def steps_to_first_token(toy: Any, *, victim: bool, share: bool, seed: int) -> int:
    """The steps that an attacker's request for a text takes, at a load that is the same each time.

    ``victim``: another tenant has asked for that text, and not for one of the same length. ``share``: as if tenants
    found each other's prefixes.
    """
    rng = np.random.default_rng(seed)
    engine = engine_of(toy, blocks=40, prefill_tokens=8)
    text, other = (rng.integers(0, 250, 64).tolist() for _ in range(2))
    names = ["same"] * 2 if share else ["victim", "attacker"]
    run(engine, ask(text if victim else other, tenant=names[0]))
    for _ in range(int(rng.integers(0, 3))):  # others run at the time
        engine.add_request(ask(rng.integers(0, 250, int(rng.integers(4, 30))).tolist(), tenant="load"))
    guess = ask(text, tenant=names[1])
    engine.add_request(guess)
    steps = 0
    while not guess.output_length:
        engine.step()
        steps += 1
    engine.executor.close()
    return steps


@pytest.mark.matrix
def test_nobody_can_tell_what_another_tenant_asked(toy: Any) -> None:
    """A permutation test on the time that an attacker sees; it finds the difference where tenants share."""

    def p_value(*, share: bool) -> float:
        times = [
            np.array([steps_to_first_token(toy, victim=v, share=share, seed=s) for s in range(60)])
            for v in (True, False)
        ]
        seen, both, rng = abs(times[0].mean() - times[1].mean()), np.concatenate(times), np.random.default_rng(0)
        shuffled = [rng.permutation(both) for _ in range(2000)]
        return float(np.mean([abs(s[:60].mean() - s[60:].mean()) >= seen for s in shuffled]))

    assert p_value(share=False) > 0.05
    assert p_value(share=True) < 0.001


def test_a_copy_that_is_pending_holds_its_source_and_its_destination(toy: Any) -> None:
    """Until the step that makes it has run, if several are in flight; where the request ends before, it isn't made."""
    engine = engine_of(partial(toy, caps=ExecutorCaps(in_flight=2)))
    cache, pool = engine.scheduler.cache, engine.pools["g0"]
    run(engine, ask(list(range(20))))
    for copied in (False, True):
        engine.add_request(request := ask([*range(12), 99, 98]))
        if copied:
            batch = engine.scheduler.schedule()
            [[source, to]] = batch.step.copies["g0"].tolist()
        else:
            assert cache.begin(Candidate(request))
            [(source, to)] = cache.copies["g0"]
        assert request.tables["g0"][1] == to and (pool.holders(source), pool.holders(to)) == (1, 2)
        if copied:
            engine.scheduler.commit(batch, engine.executor.run(batch.step))  # type: ignore[attr-defined]
            assert (pool.holders(source), pool.holders(to)) == (0, 1)
        engine.abort(request)
        assert not cache.copies.get("g0") and (pool.holders(source), pool.holders(to)) == (0, 0)
        check(engine)


def test_where_a_copy_and_its_source_are_too_much_the_tokens_are_computed(toy: Any) -> None:
    engine = engine_of(toy, blocks=3)
    run(engine, ask(list(range(24)), 1))
    for prompt, reused in ((24, 8), (16, 12)):  # it needs three blocks of three, or two, and a part of one is found
        request = ask([*range(12), *[99] * (prompt - 12)], 1)
        assert run(engine, request) == [alone(toy, (0,), request)]
        assert request.cached_tokens == reused
        run(engine, ask(list(range(24)), 1))


def test_a_block_that_is_still_to_be_copied_is_cleared_by_the_step_after(toy: Any) -> None:
    engine = engine_of(partial(toy, caps=ExecutorCaps(in_flight=2)))
    run(engine, ask(list(range(20))))
    engine.add_request(ask([*range(12), 99, 98]))
    cache, pool = engine.scheduler.cache, engine.pools["g0"]
    [source] = [node.blocks[0] for node in cache.index.nodes() if node.items == (*range(8, 16),)]  # type: ignore[union-attr]
    free = 63
    cache.clears = {"g0": [source, free]}
    batch = engine.scheduler.schedule()
    assert batch.step.copies["g0"][0, 0] == source and batch.step.clears["g0"].tolist() == [free]
    assert cache.clears == {"g0": [source]} and pool.holders(free) == 1, "it isn't given away while the step runs"
    cache.clears = {}
    engine.scheduler.commit(batch, engine.executor.run(batch.step))  # type: ignore[attr-defined]
    assert pool.holders(free) == 0
    run(engine)


def test_who_waits_for_a_copy_of_a_step_that_failed_begins_again(toy: Any) -> None:
    """Also one that isn't in that step."""
    engine = engine_of(toy)
    scheduler = engine.scheduler
    run(engine, ask(list(range(20))))
    engine.add_request(first := ask([50, 51, 52]))
    engine.step()
    engine.add_request(second := ask([*range(12), 99, 98]))
    batch = scheduler.schedule()
    assert [chunk.request for chunk in batch.chunks] == [first, second] and len(batch.step.copies["g0"]) == 1
    scheduler.compute_again(replace(batch, chunks=batch.chunks[:1]), {})
    assert [*scheduler.waiting] == [first, second] and not scheduler.running
    check(engine)
    assert run(engine) == [] and first.tokens[3:] == alone(toy, (0,), first)
    assert second.tokens[14:] == alone(toy, (0,), second)


def test_who_waits_for_a_copy_of_a_step_that_is_given_up_begins_again(toy: Any) -> None:
    """The requests of the step itself keep their blocks: they are to be failed."""
    engine = engine_of(toy)
    scheduler = engine.scheduler
    run(engine, ask(list(range(20))))
    engine.add_request(first := ask([50, 51, 52]))
    engine.step()
    engine.add_request(second := ask([*range(12), 99, 98]))
    batch = scheduler.schedule()
    scheduler.give_up(replace(batch, chunks=batch.chunks[:1]))
    assert scheduler.running == [first] and [*scheduler.waiting] == [second] and first.tables
    engine.fail(first, ValueError("no"))
    check(engine)
    run(engine)
    assert second.tokens[14:] == alone(toy, (0,), second)


def test_what_takes_a_placeholder_s_place_tells_prefixes_apart(toy: Any) -> None:
    prompt = [1, 2, *[99] * 9, 3, *range(20)]
    contents = dict.fromkeys(range(2, 11), b"one")
    engine = engine_of(toy)
    for changed, reused in (
        ({}, 0),  # the first: nothing is known
        ({}, 31),
        ({2: b"other"}, 0),  # fewer tokens than LEAST_COPIED are alike before it
        ({10: b"other"}, 8),  # and in the block after it
        ({10: b"other"}, 31),
    ):
        request = ask(prompt, contents=contents | changed)
        run(engine, request)
        assert request.cached_tokens == reused, changed
    plain = ask(prompt)
    run(engine, plain)
    assert plain.cached_tokens == 0


def test_adapters_of_a_tenant_find_their_own_prefixes_and_are_forgotten_together(toy: Any, tmp_path: Path) -> None:
    engine = engine_of(toy)
    cache = engine.scheduler.cache
    cache.tier = open_tier(engine.executor, cache, tmp_path / "kept")

    def cached(tenant: str, adapter: str) -> int | None:
        request = ask(list(range(24)), tenant=tenant, adapter=adapter)
        run(engine, request)
        return request.cached_tokens

    who = [("a", ""), ("a", "x"), ("a", "y"), ("b", "x")]
    assert [cached(*one) for one in who] == [0, 0, 0, 0]
    cache.save_all(cache.tier)
    cache.tier.flush()
    assert [cached(*one) for one in who] == [23, 23, 23, 23]
    assert cache.forget("a") == 9
    assert [cached(*one) for one in who] == [0, 0, 0, 23]
    cache.tier.close()
