"""Pools fit their budget, and hold what they say."""

from __future__ import annotations

import pytest

from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.kv_cache.pool_plan import (
    Offloadable,
    PoolPlan,
    bytes_for,
    enough_for_windows,
    plan_offload,
    plan_pools,
)
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.errors import CapacityError

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
        assert PoolPlan.from_blocks(groups, plan.blocks) == plan


CHOOSING = CacheGroup("some", (1, 3, 4), kv_heads=2, key_head_size=16, value_head_size=16, summaries=True)
"""24,576 bytes a block that may be offloaded, and 384 of minima and maxima."""


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("budget", [150_000, 400_000, 1_000_000, 20_000_000])
def test_most_blocks_may_wait_on_a_disk(budget: int, layers: int) -> None:
    both, waits = (FULL, CHOOSING), 8192 * layers
    stays = 8192 + cache_block_bytes(CHOOSING) - waits
    plan, slots = plan_offload(both, budget, 10**9, 10_000, {"some": Offloadable(layers, 3)})
    blocks, some = plan.blocks["some"], slots["some"]
    assert plan.blocks["full"] == blocks and plan.tokens == 32 * blocks <= 10_016
    used = blocks * stays + some * waits
    assert used <= budget and (some == blocks or budget - used < waits)
    assert max(3, blocks / 4) <= some <= blocks or (blocks < 3 and some == blocks)
    more, fewer = blocks + 1, max(3, -(-(blocks + 1) // 4))  # one block more fits neither
    assert plan.tokens == 10_016 or more * stays + fewer * waits > budget


def test_a_disk_holds_all_of_them() -> None:
    plan, slots = plan_offload([CHOOSING], 10**9, 10 * 24_576 + 5, 10_000, {"some": Offloadable(3, 3)})
    assert plan.blocks == {"some": 10} and slots == {"some": 10}
    with pytest.raises(CapacityError, match=r"offload_size: .* is less than (.|\n)* 74112 .*offload_size of 24576 "):
        plan_offload([CHOOSING], 10**9, 24_575, 10_000, {"some": Offloadable(3, 3)})


@pytest.mark.parametrize("owners", [2, 3])
def test_every_owner_has_whole_splits(owners: int) -> None:
    both = (FULL, WINDOW)
    unit = 512 * owners // 64 * 20480
    with pytest.raises(CapacityError, match=f"{512 * owners} tokens need"):
        plan_pools(both, unit - 1, 10**9, owners=owners)
    for enough in ({}, {"window": 700}):
        plan = plan_pools(both, 5 * unit + 1000, 10**9, 0, enough, owners)
        assert plan.bytes <= 5 * unit + 1000
        assert all(plan.blocks[g.name] * g.block_size % (512 * owners) == 0 for g in both)


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


def test_states_memory_is_whole_snapshots_of_all_groups() -> None:
    """Two groups of states of 64 and 128 bytes a block: 500 bytes are two snapshots besides the three requests'."""
    states = [
        CacheGroup(name, (0,), 1, 1, 1, block_size=1 << 20, kind="state", state_size=size)
        for name, size in (("small", 16), ("large", 32))
    ]

    def blocks(states_memory: int | None) -> dict[str, int]:
        enough = enough_for_windows([FULL, *states], 3, 100, states_memory=states_memory)
        return {name: tokens >> 20 for name, tokens in enough.items()}

    assert blocks(500) == {"small": 5, "large": 5}
    assert blocks(0) == {"small": 3, "large": 3}
    assert blocks(None) == {"small": 6, "large": 6}, "a snapshot for each request"
    assert blocks(1 << 40) == {"small": 2047, "large": 2047}, "slots are 32-bit integers"
