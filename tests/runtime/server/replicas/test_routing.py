from __future__ import annotations

import random
from collections import Counter

import pytest

from enginewright.runtime.server.replicas.routing import BLOCK_TOKENS, Routes, Ticket, block_names

SYSTEM = list(range(10 * BLOCK_TOKENS))


def routes(policy: str = "prefix", replicas: str = "ab", tokens: int = 0) -> Routes:
    table = Routes(policy)  # type: ignore[arg-type]
    for name in replicas:
        table.link(name, "v1", tokens)
    return table


def take(found: Routes, number: int, prompt: list[int], candidates: str = "ab", **more: object) -> str:
    """The replica that a request goes to, where it stays."""
    ticket = Ticket(block_names("", prompt), "v1", **more)  # type: ignore[arg-type]
    found.begin(number, ticket)
    name = found.order(number, candidates)[0]
    found.sent(number, name)
    return name


@pytest.mark.parametrize("length", [0, 31, 32, 33, 64, 100])
def test_whole_blocks_have_names(length: int) -> None:
    ids = list(range(length))
    names = block_names("a", ids)
    assert len(names) == length // BLOCK_TOKENS == len(set(names))
    assert names == block_names("a", [*ids, 7])[: len(names)]


def test_a_name_says_all_that_is_before_it_and_whose_it_is() -> None:
    ids = list(range(96))
    names = block_names("a", ids)
    other = block_names("a", [999, *ids[1:]])
    assert not set(names) & set(other)
    assert not set(names) & set(block_names("b", ids)) and not set(names) & set(block_names("a\0salt", ids))
    assert block_names("a", [*ids[:64], *ids[:32]])[:2] == names[:2] and len(names) == 3


def test_the_longest_known_prefix_goes_before_load() -> None:
    table = routes()
    first = take(table, 1, SYSTEM + [1] * 64)
    other = take(table, 2, [5] * 640)
    assert other != first  # it knows as little, and has nothing to do
    table.end(2)
    assert take(table, 3, SYSTEM + [2] * 64) == first  # though the other one has nothing to do
    assert take(table, 4, [5] * 640 + [6] * 64) == other


def test_load_goes_first_where_it_is_far_apart() -> None:
    table = routes()
    first = take(table, 0, SYSTEM)
    names = [take(table, n, SYSTEM) for n in range(1, 8)]
    assert names[:2] == [first, first] and names[2] != first  # 3 there, none here
    assert 0 < names.count(first) < len(names)
    for n in range(8):
        table.end(n)
    assert table.requests("a") == table.requests("b") == 0


def test_conversations_stay_where_they_are() -> None:
    rng = random.Random(3)
    table, number = routes(replicas="abc"), 0
    homes: dict[int, set[str]] = {}
    history = {c: SYSTEM + [1000 + c] * 96 for c in range(6)}
    for _ in range(8):
        turn = list(history)
        rng.shuffle(turn)
        for c in turn:
            number += 1
            homes.setdefault(c, set()).add(take(table, number, history[c], "abc"))
            history[c] = [*history[c], *(rng.randrange(50) for _ in range(80))]
        for n in range(number - len(turn) + 1, number + 1):
            table.end(n)
    assert all(len(names) == 1 for names in homes.values()), homes
    assert len(set.union(*homes.values())) > 1


@pytest.mark.parametrize("replicas", ["ab", "abcd"])
def test_round_robin_and_load(replicas: str) -> None:
    table = routes("round-robin", replicas)
    names = [take(table, n, SYSTEM, replicas) for n in range(2 * len(replicas))]
    assert names[: len(replicas)] == names[len(replicas) :] and set(names) == set(replicas)
    table = routes("load", replicas)
    names = [take(table, n, SYSTEM, replicas) for n in range(len(replicas))]
    assert set(names) == set(replicas)
    table.end(1)
    assert take(table, 99, SYSTEM, replicas) == names[1]


def test_the_table_is_bounded_and_a_begin_outlives_its_end() -> None:
    table = routes(replicas="a", tokens=8 * BLOCK_TOKENS)
    take(table, 1, list(range(6 * BLOCK_TOKENS)), "a")
    take(table, 2, [7] * 4 * BLOCK_TOKENS, "a")
    (row,) = table._linked.values()
    assert len(row.blocks) == 8
    assert row.known(block_names("", list(range(6 * BLOCK_TOKENS)))) == 4
    assert row.known(block_names("", [7] * 4 * BLOCK_TOKENS)) == 4


def test_a_lost_replica_knows_nothing_and_gets_nothing() -> None:
    table = routes()
    first = take(table, 1, SYSTEM)
    assert table.requests(first) == 1
    table.unlink(first)
    ticket = Ticket(block_names("", SYSTEM), "v1", avoid=frozenset(first))
    table.begin(2, ticket)
    assert table.order(2, "ab") == [name for name in "ab" if name != first]
    table.link(first, "v1", 0)
    assert table.requests(first) == 0
    assert table.order(2, "ab")[0] != first  # it is to be avoided
    assert table.order(2, first) == [first]  # unless there is no other


def test_a_request_goes_to_the_bundle_that_it_was_made_for() -> None:
    table = routes(replicas="a")
    table.link("b", "v2", 0)
    for version, expected in (("v1", ["a"]), ("v2", ["b"]), ("v3", [])):
        table.begin(1, Ticket((), version))
        assert table.order(1, "ab") == expected
    assert table.versions() == {"v1", "v2"}
    table.begin(2, Ticket())  # a greeting
    assert table.order(2, "abc") == ["c"]
    table.begin(3, Ticket(only="a"))
    assert table.order(3, "abc") == ["a"] and table.order(3, "bc") == []


def test_of_many_that_come_together_each_sees_those_before_it() -> None:
    table, chosen = routes(replicas="abcd"), Counter[str]()
    for n in range(40):
        table.begin(n, Ticket(block_names("", [n] * 64), "v1"))
        chosen[table.order(n, "abcd")[0]] += 1
    assert set(chosen.values()) == {10} and len(chosen) == 4
    assert not any(map(table.requests, "abcd"))  # Ray hasn't sent any of them yet, and may try another replica
    table.sent(0, "d")
    assert list(map(table.requests, "abcd")) == [0, 0, 0, 1]
