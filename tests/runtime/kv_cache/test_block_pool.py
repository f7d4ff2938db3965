"""Blocks are held, shared and released; none is lost or handed out twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from enginewright.runtime.kv_cache.block_pool import BlockPool, DividedPool
from enginewright.runtime.shared.errors import CapacityError


@pytest.mark.parametrize("blocks", [1, 7])
def test_all_blocks_can_be_held(blocks: int) -> None:
    pool = BlockPool(blocks)
    assert sorted(pool.allocate() for _ in range(blocks)) == list(range(blocks))
    assert pool.free_blocks == 0
    with pytest.raises(CapacityError, match=f"all {blocks} KV blocks"):
        pool.allocate()


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert (pool.holders(block), pool.free_blocks) == (1, 1)
    pool.release(block)
    assert (pool.holders(block), pool.free_blocks) == (0, 2)


def test_a_free_block_can_be_neither_released_nor_shared() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release(block)
    for action in (pool.release, pool.share):
        for wrong in (block, 1, -1, 2):
            with pytest.raises(ValueError, match=f"KV block {wrong} is not held"):
                action(wrong)
    assert pool.free_blocks == 2


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        BlockPool(-1)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a dict that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(5)
        self.held: dict[int, int] = {}

    @precondition(lambda self: len(self.held) < 5)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert block not in self.held
        self.held[block] = 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.share(block)
        self.held[block] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release(block)
        self.held[block] -= 1
        if not self.held[block]:
            del self.held[block]

    @invariant()
    def agrees(self) -> None:
        assert self.pool.free_blocks == 5 - len(self.held)
        assert [self.pool.holders(b) for b in range(5)] == [self.held.get(b, 0) for b in range(5)]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)


def test_what_blocks_are_for_a_view() -> None:
    pool = BlockPool(5)
    held, shared, cached = (pool.allocate() for _ in range(3))
    pool.share(shared)
    pool.keep(cached, "a")
    pool.release(cached)
    assert pool.states(0, 5) == bytes([1, 2, 3, 0, 0])
    assert pool.states(held, held + 1) == bytes([1]) and pool.states(3, 9) == bytes(2)


def test_a_block_is_pinned_in_whatever_state_it_is() -> None:
    pool = BlockPool(4)
    held, cached, free = pool.allocate(), pool.allocate(), 3
    pool.keep(cached, "t")
    pool.release(cached)
    for block in (held, cached, free):
        pool.pin(block)
    pool.drop(cached)
    assert [pool.holders(block) for block in (held, cached, free)] == [2, 1, 1]
    assert (pool.free_blocks, pool.kept_blocks, pool.available()) == (1, 0, 1) and pool.allocate() == 2
    assert [pool.pins(block) for block in range(4)] == [1, 1, 0, 1] and pool.states(0, 4) == b"\1\0\1\0"
    for block in (held, cached, free):
        pool.unpin(block)
    with pytest.raises(KeyError):
        pool.unpin(held)
    assert pool.free_blocks == 2 and {pool.allocate(), pool.allocate()} == {cached, free}
    divided = DividedPool(4, 2)
    divided.pin(3)
    assert divided.holders(3) == 1 and divided.available_of() == [2, 1]
