"""A prefix is found by its tokens alone, and what was evicted never again."""

from __future__ import annotations

from enginewright.runtime.kv_cache.prefix_index import PrefixIndex
from enginewright.runtime.requests.block_keys import Namespace
from enginewright.runtime.requests.block_tables import NO_BLOCK

A, B = Namespace("a"), Namespace("b")


def made(*, windowed: tuple[bool, ...] = (False,)) -> tuple[PrefixIndex, list[tuple[int, int]]]:
    dropped: list[tuple[int, int]] = []
    return PrefixIndex(4, windowed, lambda group, block: dropped.append((group, block))), dropped


def test_the_longest_beginning_of_many() -> None:
    index, _ = made()
    root = index.root(A)
    first = index.add(root, (1, 2, 3, 4), [10])
    index.add(root, (1, 2, 9, 9), [11])
    index.add(first, (5, 6, 7, 8), [12])
    index.add(first, (5, 6, 0), [13])
    for tokens, most, length, blocks in (
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 9, 8, [10, 12]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 7, 7, [10, 12]),
        ([1, 2, 3, 4, 5, 6, 0, 1], 8, 7, [10, 13]),
        ([1, 2, 3, 4, 6], 5, 4, [10]),
        ([1, 2, 9], 3, 3, [11]),
        ([1, 2], 1, 1, [10]),
        ([2], 1, 0, []),
    ):
        match = index.find(A, tokens, most)
        assert (match.tokens, [node.blocks[0] for node in match.nodes]) == (length, blocks), tokens
    assert index.find(B, [1, 2, 3, 4], 4).tokens == 0


def test_a_part_gives_way_to_the_whole() -> None:
    index, dropped = made()
    root = index.root(A)
    index.add(root, (1, 2), [10])
    whole = index.add(root, (1, 2, 3, 4), [11])
    assert dropped == [(0, 10)] and root.children == [whole]
    assert index.add(root, (1, 2, 3), [12]) is root
    assert index.find(A, [1, 2, 3], 3).nodes == (whole,)


def test_what_is_evicted_takes_what_is_behind_it_away() -> None:
    index, dropped = made()
    first = index.add(index.root(A), (1, 2, 3, 4), [10])
    second = index.add(first, (5, 6, 7, 8), [11])
    index.add(second, (9,), [12])
    index.forget(0, 10)
    assert sorted(dropped) == [(0, 11), (0, 12)]
    assert first.detached and second.detached
    again = index.add(index.root(A), (1, 2, 3, 4), [20])
    assert again.serial > second.serial
    assert index.find(A, [1, 2, 3, 4, 5, 6, 7, 8], 8).tokens == 4


def test_a_window_s_block_may_be_lost_alone() -> None:
    index, dropped = made(windowed=(False, True))
    first = index.add(index.root(A), (1, 2, 3, 4), [10, 30])
    index.forget(1, 30)
    assert first.blocks == [10, NO_BLOCK] and not dropped
    assert index.add(index.root(A), (1, 2, 3, 4), [11, 31]) is first
    assert first.blocks == [10, 31], "what is lacking is taken, what is there stays"


def test_nothing_is_left_of_what_nobody_needs() -> None:
    index, _ = made(windowed=(True,))
    first = index.add(index.root(A), (1, 2, 3, 4), [10])
    second = index.add(first, (5, 6, 7, 8), [11])
    index.forget(0, 10)
    assert not first.detached, "what is behind it may be of use: a window sees no further"
    second.users = 1
    index.forget(0, 11)
    assert not second.detached, "a request will go on there"
    second.users = 0
    index.prune(second)
    assert first.detached and second.detached and not index._roots
