"""Messages between ranks that share no memory: a gloo group of torch.distributed.

Whoever can reach its ports can end the ranks, and read what they say: they belong on a private network.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from enginewright.runtime.shared.contracts import Int32Array, StepInput

_FOREVER = timedelta(days=1000)
_STEPS, _VALUES = 1, 2  # tags of messages
_FIRST = 4096  # bytes of a step's first message; what doesn't fit into it is in a second one
_SIZES = 2  # int64 that it begins with: bytes of the step, and of the blocks to copy

Bytes = npt.NDArray[np.uint8]


class SilentRankError(Exception):
    """A rank sends nothing, or can't be reached; ``rank`` is its number."""

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(problem)
        self.rank, self.problem = rank, problem


class LostRanksError(Exception):
    """A collective failed: some rank sends nothing, or can't be reached. Which one is said by none."""


class Mail:
    """What ranks send each other: a gloo group of their own, apart from any that the process has.

    Args:
        rank: this one.
        machines: of each rank, its address.
        timeout: seconds that it waits for a message.

    Attributes:
        moved: messages that this rank's programs have sent or received.
        sent_bytes: of those.
    """

    def __init__(self, rank: int, machines: Sequence[str], timeout: float) -> None:
        self._rank, self._machines, self._seconds = rank, machines, timeout
        self._patience = timedelta(seconds=timeout)
        self._group: ProcessGroupGloo | None = None
        self._unread: deque[tuple[torch.Tensor, list[tuple[int, Any]]]] = deque()
        self.moved = self.sent_bytes = 0

    def open(self, store: TCPStore) -> None:
        """Joins the group, when all ranks do. Raises RuntimeError if one doesn't in time."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=self._machines[self._rank])]
        options._timeout = timedelta(seconds=max(self._seconds, 30.0))
        options._threads = 1
        self._group = ProcessGroupGloo(store, self._rank, len(self._machines), options)

    def move(self, to: list[int], own: Bytes, sources: list[int], theirs: list[Bytes]) -> None:
        """See ``_cpu.MessageExchange``. Raises SilentRankError."""
        self.moved += 1
        self.sent_bytes += len(to) * own.size
        received = [self._receive(array, source, _VALUES) for array, source in zip(theirs, sources, strict=True)]
        if to and not sources:  # no answer says when it was read: so it must stay
            self._send_later(torch.from_numpy(own.copy()), to, _VALUES)
        elif to:
            self._finish(self._send(torch.from_numpy(own), to, _VALUES))
        self._finish(received)

    def post(self, step: Bytes, copies: Bytes) -> None:
        """Sends a step to all others; of rank 0. Raises SilentRankError where one doesn't take those before."""
        others = [rank for rank in range(len(self._machines)) if rank != self._rank]
        head = np.array([step.size, copies.size], np.int64).view(np.uint8)
        whole = np.concatenate([head, step, copies])
        first = np.zeros(_FIRST, np.uint8)
        first[: whole.size] = whole[:_FIRST]
        self._send_later(torch.from_numpy(first), others, _STEPS)
        if whole.size > _FIRST:
            self._send_later(torch.from_numpy(whole[_FIRST:].copy()), others, _STEPS)

    def next_step(self) -> tuple[Bytes, Bytes]:
        """Waits for a step, however long that takes. Raises SilentRankError where rank 0 has gone."""
        first = np.empty(_FIRST, np.uint8)
        self._finish([self._receive(first, 0, _STEPS)], _FOREVER)
        begin = 8 * _SIZES
        step, copies = (int(n) for n in first[:begin].view(np.int64))
        size = begin + step + copies
        whole = first
        if size > _FIRST:
            whole = np.empty(size, np.uint8)
            whole[:_FIRST] = first
            self._finish([self._receive(whole[_FIRST:], 0, _STEPS)])
        return whole[begin : begin + step], whole[begin + step : size]

    def _send(self, tensor: torch.Tensor, to: Sequence[int], tag: int) -> list[tuple[int, Any]]:
        assert self._group is not None
        works = []
        for rank in to:
            with self._silent(rank):
                works.append((rank, self._group.send([tensor], rank, tag)))  # type: ignore[attr-defined]
        return works

    def _send_later(self, tensor: torch.Tensor, to: Sequence[int], tag: int) -> None:
        """Sends what is taken sooner or later, and waits for what was sent long before."""
        self._unread.append((tensor, self._send(tensor, to, tag)))
        while len(self._unread) > 4 * len(self._machines):
            self._finish(self._unread.popleft()[1])

    def _receive(self, array: Bytes, source: int, tag: int) -> tuple[int, Any]:
        assert self._group is not None
        with self._silent(source):
            return source, self._group.recv([torch.from_numpy(array)], source, tag)  # type: ignore[attr-defined]

    def _finish(self, works: Sequence[tuple[int, Any]], limit: timedelta | None = None) -> None:
        for rank, work in works:
            with self._silent(rank, waits=limit is None):
                work.wait(limit or self._patience)

    @contextlib.contextmanager
    def _silent(self, rank: int, *, waits: bool = False) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        except RuntimeError as e:
            late = waits and time.monotonic() - begun >= self._seconds
            problem = f"sent nothing for {self._seconds:g} s" if late else "can't be reached any more"
            raise SilentRankError(rank, problem) from e


def packed_step(groups: Sequence[str], step: StepInput) -> Bytes:
    """A step as bytes, for ranks that compute and don't sample: ``groups`` are the cache groups, in some order."""
    none = np.zeros(0, np.int32)
    arrays = [step.ids, step.positions, step.q_start, step.kv_len, step.rows]
    for group in groups:
        arrays += [step.slots[group], step.block_tables[group]]
        arrays += [step.clears.get(group, none), step.copies.get(group, none)]
    lengths = np.array([array.size for array in arrays], np.int32)
    return np.concatenate([lengths, *(array.reshape(-1) for array in arrays)]).astype(np.int32).view(np.uint8)


def unpacked_step(groups: Sequence[str], packed: Bytes) -> StepInput:
    """What ``packed_step`` was given, without sampling and what is to be returned."""
    numbers = packed.copy().view(np.int32)
    count = 5 + 4 * len(groups)
    ends = count + np.cumsum(numbers[:count])
    ids, positions, q_start, kv_len, rows, *of_groups = np.split(numbers, [count, *ends])[1:-1]
    slots, tables, clears, copies = ({g: of_groups[4 * i + n] for i, g in enumerate(groups)} for n in range(4))
    return StepInput(
        ids=ids,
        positions=positions,
        q_start=q_start,
        kv_len=kv_len,
        rows=rows,
        slots=slots,
        block_tables={g: table.reshape(len(kv_len), -1) for g, table in tables.items()},
        clears={g: blocks for g, blocks in clears.items() if blocks.size},
        copies={g: pairs.reshape(-1, 2) for g, pairs in copies.items() if pairs.size},
    )


def packed_copies(groups: Sequence[str], copies: Mapping[str, Int32Array]) -> Bytes:
    """A step's ``copies`` as bytes: of each cache group how many there are, then they."""
    none = np.zeros((0, 2), np.int32)
    lists = [copies.get(group, none).reshape(-1) for group in groups]
    parts = [np.array([pairs.size // 2, *pairs], np.int32) for pairs in lists]
    return np.concatenate(parts).view(np.uint8) if copies else np.zeros(0, np.uint8)


def unpacked_copies(groups: Sequence[str], packed: Bytes) -> dict[str, Int32Array]:
    """What ``packed_copies`` was given."""
    numbers, at, found = packed.copy().view(np.int32), 0, dict[str, Int32Array]()
    for group in groups if packed.size else ():
        end = at + 1 + 2 * int(numbers[at])
        if end > at + 1:
            found[group] = numbers[at + 1 : end].reshape(-1, 2)
        at = end
    return found
