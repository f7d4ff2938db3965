"""Pools fit their budget, hold what they say, and sizes are read and written as people do."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.runtime.kv_cache.cache_groups import (
    PoolPlan,
    bytes_for,
    check_free,
    default_budget,
    format_bytes,
    free_memory,
    parse_size,
    plan_pools,
)
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.errors import CapacityError, RequestError

FULL = CacheGroup("full", (0, 2), kv_heads=2, key_head_size=8, value_head_size=8)  # 8192 bytes a block
WINDOW = CacheGroup("window", (1,), kv_heads=1, key_head_size=8, value_head_size=8, window=64, block_size=64)


@pytest.mark.parametrize(("groups", "unit_bytes", "unit"), [((FULL,), 8192, 32), ((FULL, WINDOW), 20480, 64)])
def test_pools_fit_the_budget(groups: tuple[CacheGroup, ...], unit_bytes: int, unit: int) -> None:
    for budget in (unit_bytes, 3 * unit_bytes - 1, 10 * unit_bytes):
        plan = plan_pools(groups, budget, 10**9)
        assert plan.tokens == budget // unit_bytes * unit
        assert plan.bytes <= budget < plan.bytes + unit_bytes
        assert all(plan.blocks[g.name] * g.block_size == plan.tokens for g in groups)
        assert bytes_for(groups, plan.tokens) == plan.bytes
        assert PoolPlan.of(groups, plan.blocks) == plan


def test_no_more_than_is_needed() -> None:
    assert plan_pools([FULL], 1 << 40, 100).tokens == 128  # whole blocks


@pytest.mark.parametrize("budget", [0, 8191])
def test_a_budget_without_a_block_is_refused_with_what_would_do(budget: int) -> None:
    with pytest.raises(CapacityError, match=r"memory: .* holds no block(.|\n)*8192 bytes"):
        plan_pools([FULL], budget, 100)


def test_a_model_without_a_cache_is_not_limited_by_memory() -> None:
    assert plan_pools([], 0, 100).tokens == 100


def test_the_statement() -> None:
    plan = plan_pools([FULL], 3072 * 8192, 10**9)
    assert str(plan) == "KV cache: 24.0 MiB, 3072 blocks of 32 tokens = 98304 tokens"
    both = str(plan_pools([FULL, WINDOW], 20480, 10**9))
    assert both == "KV cache: 20.0 KiB, 2 blocks of 32 tokens (full) and 1 blocks of 64 tokens (window) = 64 tokens"


@pytest.mark.parametrize(
    ("text", "size"),
    [(12, 12), ("12", 12), ("512MiB", 512 << 20), ("1.5 GB", 1_500_000_000), ("2g", 2 * 10**9), ("3 KiB", 3072)],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1", "1XB", "1.2.3", "MiB", "1ib"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(RequestError, match="memory: "):
        parse_size(text)


def test_bytes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 30, 3 << 40, 5000 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3.0 TiB",
        "5000.0 TiB",
    ]


def test_free_memory_is_the_lesser_of_system_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:  4000 kB\n")
    assert free_memory(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("3000\n")
    assert free_memory(meminfo, tmp_path) == 2000
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 300\nactive_file 200\n")
    assert free_memory(meminfo, tmp_path) == 2300  # what files hold is dropped when it is wanted
    (tmp_path / "memory.max").write_text("500\n")
    assert free_memory(meminfo, tmp_path) == 0


def test_more_than_is_free_is_refused() -> None:
    check_free(1 << 20, "a KV cache")
    with pytest.raises(CapacityError, match=r"memory: a KV cache of 1024\.0 TiB is more than the .* that are free"):
        check_free(1 << 50, "a KV cache")


def test_free_memory_where_linux_does_not_say(tmp_path: Path) -> None:
    half = free_memory(tmp_path / "none", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == half > 1 << 20


def test_the_default_is_a_share() -> None:
    assert 0 < default_budget() < free_memory()
