"""Copies of evicted blocks in main memory: found again, bounded, passed on to a folder, dropped after an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.engine.prefixes import close_tier, open_host_tier, open_tier
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.request_options import RequestOptions
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.contracts import ExecutorCaps
from enginewright.runtime.shared.errors import CapacityError, RequestError

BLOCK = 8
BLOCK_BYTES = 4 * BLOCK  # of int32


@pytest.fixture(autouse=True)
def _key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def engine(toy: Any) -> Iterator[Engine]:
    """One whose pool has 6 blocks of 8 tokens."""
    built = Engine(toy(6, BLOCK, caps=ExecutorCaps(shared_blocks=True)), SchedulerConfig(2, 64, prefix_cache=True))
    yield built
    built.executor.close()


def host(engine: Engine, blocks: int, disk: Any = None) -> dict[str, int]:
    """Gives an engine memory for copies of some blocks; returns its counters, which stay up to date."""
    cache = engine.scheduler.cache
    cache.tier = open_host_tier(engine.executor, cache, blocks * BLOCK_BYTES, disk)
    return cache.tier.use  # type: ignore[attr-defined, no-any-return]


def run(engine: Engine, first: int, tenant: str = "") -> Generation:
    """A request of 4 blocks of tokens and one more, which differ by ``first``."""
    prompt = [first + i for i in range(4 * BLOCK + 1)]
    request = Generation(prompt, SamplingParams(max_tokens=4, ignore_eos=True), options=RequestOptions(tenant))
    engine.add_request(request)
    while engine.has_work():
        engine.step()
    return request


def test_evicted_blocks_are_copied_back(engine: Engine) -> None:
    use: Any = host(engine, 16)
    first = run(engine, 100)
    others = [run(engine, 200), run(engine, 300)]  # evict it
    again = run(engine, 100)
    assert [request.cached_tokens for request in (first, *others, again)] == [0, 0, 0, 4 * BLOCK]
    assert again.tokens == first.tokens
    statistics = engine.scheduler.cache.statistics(())
    assert statistics is not None
    assert (statistics["reused"], statistics["from_host"], statistics["from_disk"]) == (4 * BLOCK, 4 * BLOCK, 0)
    assert (use.loaded, use.evicted) == (4, 0) and use.saved >= 8
    assert statistics["host"]["records"] == use.saved
    assert statistics["host"]["bytes"] == use.saved * BLOCK_BYTES <= statistics["host"]["total_bytes"]


def test_a_preempted_request_goes_on_from_its_copies(engine: Engine) -> None:
    use: Any = host(engine, 16)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [Generation([first + i for i in range(18)], params) for first in (100, 200)]
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        engine.step()
    assert engine.preemptions > 0 and use.loaded > 0
    assert all(request.finish_reason == "length" for request in requests)


def test_its_memory_is_bounded_and_the_least_used_goes(engine: Engine) -> None:
    use: Any = host(engine, 5)
    for first in (100, 200, 300, 400):
        run(engine, first)
    statistics = engine.scheduler.cache.statistics(())
    assert statistics is not None
    assert statistics["host"]["total_bytes"] == 5 * BLOCK_BYTES
    assert statistics["host"]["records"] == 5 and use.evicted == use.saved - 5 > 0
    assert run(engine, 100).cached_tokens == 0


def test_a_tenant_s_copies_are_deleted(engine: Engine) -> None:
    host(engine, 16)
    for tenant in ("me", "you"):
        run(engine, 100, tenant)
    run(engine, 200)
    assert engine.scheduler.forget("me") == 0  # files
    run(engine, 300)
    assert [run(engine, 100, tenant).cached_tokens for tenant in ("me", "you")] == [0, 4 * BLOCK]


def test_what_leaves_main_memory_goes_to_the_folder(engine: Engine, toy: Any, tmp_path: Path) -> None:
    """A later process reads it, and what was in main memory at the end."""
    cache, folder = engine.scheduler.cache, tmp_path / "kept"
    host(engine, 4, open_tier(engine.executor, cache, folder))
    texts = {first: run(engine, first).tokens for first in (100, 200, 300)}
    assert cache.tier is not None
    cache.tier.flush()
    assert run(engine, 100).cached_tokens == 4 * BLOCK and cache.use.from_disk > 0
    close_tier(cache)
    later = Engine(toy(6, BLOCK, caps=ExecutorCaps(shared_blocks=True)), SchedulerConfig(2, 64, prefix_cache=True))
    later.scheduler.cache.tier = open_tier(later.executor, later.scheduler.cache, folder)
    for first, tokens in texts.items():
        request = run(later, first)
        assert (request.cached_tokens, request.tokens) == (4 * BLOCK, tokens)
    close_tier(later.scheduler.cache)
    later.executor.close()


@pytest.mark.parametrize("method", ["save_copy", "load_copy"])
def test_an_error_costs_a_copy_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    use: Any = host(engine, 16)
    expected = run(engine, 100).tokens

    def fails(*_: object) -> None:
        raise RuntimeError("the copy failed")

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, method, fails, raising=True)
        run(engine, 200)
        run(engine, 300)
        assert run(engine, 100).tokens == expected
    assert engine.scheduler.counters.helper_errors["prefix tier"] > 0
    statistics = engine.scheduler.cache.statistics(())
    assert statistics is not None and statistics["from_host"] == 0
    assert statistics["host"]["bytes"] == statistics["host"]["records"] * BLOCK_BYTES
    run(engine, 200)
    run(engine, 300)
    assert run(engine, 100).tokens == expected and use.loaded > 0


def test_memory_without_room_for_a_block_is_refused(engine: Engine) -> None:
    with pytest.raises(CapacityError, match=r"prefix_memory: 0 B has no room for a block(.|\n)*Pass 32 B or more"):
        host(engine, 0)


def test_without_a_prefix_cache_it_is_refused(toy: Any) -> None:
    engine = Engine(toy(6, BLOCK, caps=ExecutorCaps(shared_blocks=True)), SchedulerConfig(2, 64))
    with pytest.raises(RequestError, match="prefix_memory: target 'toy' copies no blocks to main memory"):
        host(engine, 4)
    engine.executor.close()
