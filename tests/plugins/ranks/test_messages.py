"""Steps as bytes, and connections between ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from torch.distributed import TCPStore

from enginewright.plugins.ranks.messages import Mail, SilentRankError, packed_step, unpacked_step
from enginewright.runtime.shared.contracts import StepInput


def some(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize("changed", [False, True])
def test_a_step_comes_back_as_it_was(changed: bool) -> None:
    tables = {"full": some(3, 4, 5, -1).reshape(2, 2), "window": some(7, 8).reshape(2, 1)}
    step = StepInput(
        ids=some(1, 2, 3),
        positions=some(0, 1, 9),
        q_start=some(0, 2, 3),
        kv_len=some(2, 10),
        rows=some(1, 2) if changed else some(),
        block_table=tables,
        slots={"full": some(96, 97, 128), "window": some(1, 2, 3)},
        clears={"window": some(6)} if changed else {},
        copies={"full": some(1, 2, 3, 4).reshape(2, 2)} if changed else {},
    )
    step_back = unpacked_step(["window", "full"], packed_step(["window", "full"], step))
    for name in ("ids", "positions", "q_start", "kv_len", "rows"):
        np.testing.assert_array_equal(getattr(step_back, name), getattr(step, name))
    for name in ("block_tables", "slots", "clears", "copies"):
        assert sorted(getattr(step_back, name)) == sorted(getattr(step, name))
        for group, array in getattr(step, name).items():
            np.testing.assert_array_equal(getattr(step_back, name)[group], array)


LOOPBACK = ("127.0.0.1", "127.0.0.1")


@pytest.fixture
def mails() -> Iterator[Callable[[float], tuple[Mail, Mail]]]:
    """Two ranks that have joined, of so much patience."""
    opened: list[Mail] = []

    def join(patience: float, meanwhile: Callable[[TCPStore], None] = lambda store: None) -> tuple[Mail, Mail]:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        mine, other = (Mail(rank, LOOPBACK, patience) for rank in range(2))
        opened.extend((mine, other))
        there = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=60))
        with ThreadPoolExecutor() as threads:
            first = threads.submit(mine.open, store)
            meanwhile(there)
            threads.submit(other.open, there).result()
            first.result()
        return mine, other

    yield join
    for mail in opened:
        mail.close()


@pytest.mark.parametrize("size", [1, 5000, 20_000_000])
def test_what_both_send_at_a_time_arrives(mails: Any, size: int) -> None:
    """More than the system keeps of what nobody has read, too."""
    mine, other = mails(60.0)
    sent = [np.random.default_rng(rank).integers(0, 256, size, dtype=np.uint8) for rank in range(2)]
    got = [np.zeros(size, np.uint8) for _ in range(2)]
    with ThreadPoolExecutor() as threads:
        for _ in range(2):
            other_rank = threads.submit(other.move, [0], sent[1], [0], [got[1]])
            mine.move([1], sent[0], [1], [got[0]])
            other_rank.result()
    assert np.array_equal(got[0], sent[1]) and np.array_equal(got[1], sent[0])


def test_what_nobody_waits_for_arrives_later(mails: Any) -> None:
    """A stage hands on what it has, and goes on."""
    mine, other = mails(60.0)
    sent = [np.full(5_000_000, n, np.uint8) for n in range(3)]
    for array in sent:
        mine.move([1], array, [], [])
        array[:] = 99  # it was copied
    for n in range(3):
        got = np.zeros(5_000_000, np.uint8)
        other.move([], np.zeros(0, np.uint8), [0], [got])
        assert (got == n).all()


def test_a_rank_that_says_nothing_or_has_gone(mails: Any) -> None:
    got, none = np.zeros(8, np.uint8), np.zeros(0, np.uint8)
    mine, other = mails(0.2)
    with pytest.raises(SilentRankError, match=r"sent nothing for 0.2 s") as silent:
        mine.move([], none, [1], [got])
    assert silent.value.rank == 1
    other.close()
    with pytest.raises(SilentRankError, match="can't be reached any more"):
        mine.move([], none, [1], [got])
    with pytest.raises(SilentRankError, match="can't be reached any more"):
        for _ in range(100):
            mine.move([1], got, [1], [got])


def test_a_stranger_is_no_rank(mails: Any) -> None:
    def knock(store: TCPStore) -> None:
        port = int(store.get("port/0"))
        for data in (b"x" * 40, b"GET / HTTP/1.1", b""):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(data)

    mine, other = mails(60.0, knock)
    got = np.zeros(3, np.uint8)
    mine.move([1], np.array([1, 2, 3], np.uint8), [], [])
    other.move([], np.zeros(0, np.uint8), [0], [got])
    assert got.tolist() == [1, 2, 3]
