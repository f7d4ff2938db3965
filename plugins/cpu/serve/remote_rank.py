"""A rank on another machine than rank 0: it joins by an address, and runs the steps that rank 0 sends.

    python -m enginewright.plugins.cpu.serve.remote_rank HOST:PORT RANK

HOST:PORT is rank 0's store (a TCPStore of torch.distributed), RANK a number from 1 on. In the store the rank finds what
it is to open, and says what is wrong, or that it is ready. Then all join one gloo group, which has a connection between
any two ranks.

A step comes from rank 0: what blocks to copy, and the step's inputs, as ``_cpu.pack_step`` has them. Everything else
that ranks exchange is asked for by their programs: see ``MessageExchange``.

Whoever can reach these ports can end the ranks, and read what they say: they belong on a private network.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from enginewright.runtime.bundle.reader import Bundle, Load
from enginewright.runtime.ranks.partition import Partition, partition
from enginewright.runtime.shared.contracts import Int32Array
from enginewright.runtime.shared.errors import EnginewrightError
from enginewright.runtime.shared.memory import return_freed_memory
from enginewright.runtime.shared.records import Record

from ..executable import isas
from ..extension import cpu_extension as _cpu
from .executor import CpuExecutor
from .rank_process import PartSetting, RankReply, check_same, facts

START_SECONDS = 600.0
"""That a rank may take to open its part."""

GO, END = "go", "end"
"""Keys of the store: all are ready; rank 0 has ended."""

_FOREVER = timedelta(days=1000)
_LOOK_SECONDS = 0.5
_STEPS, _VALUES = 1, 2  # tags of messages
_FIRST = 4096  # bytes of a step's first message; what doesn't fit into it is in a second one
_SIZES = 2  # int64 that it begins with: bytes of the step, and of the blocks to copy

Bytes = npt.NDArray[np.uint8]


class RemoteSetting(PartSetting, frozen=True, kw_only=True):
    """What a rank of any machine is told.

    Attributes:
        machines: of each rank, its address.
        timeout: seconds that a rank waits for what another one is to send.
    """

    machines: tuple[str, ...]
    timeout: float


class Report(Record, frozen=True, kw_only=True):
    """Why a rank ends: what went wrong in it, or what it heard no more from the rank ``of``."""

    problem: str
    of: int | None = None


class SilentRankError(Exception):
    """A rank sends nothing, or can't be reached; ``rank`` is its number."""

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(problem)
        self.rank, self.problem = rank, problem


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


def join(address: str, timeout: float = START_SECONDS) -> TCPStore:
    """Rank 0's store. Raises RuntimeError if nobody is there."""
    host, _, port = address.rpartition(":")
    return TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timedelta(seconds=timeout))


def serve_rank(address: str, rank: int) -> None:
    """Runs a rank until rank 0 ends, or something goes wrong; then it returns, having reported it."""
    store = join(address)
    setting = RemoteSetting.model_validate(msgspec.json.decode(store.get(f"setting/{rank}")))
    try:
        executor, mail = _opened(setting, rank)
    except EnginewrightError as e:
        _say(store, f"reply/{rank}", RankReply(problem=e.message, kind=type(e).__name__, hint=e.hint))
        return
    return_freed_memory()
    _say(store, f"reply/{rank}", RankReply())
    store.wait([GO], timedelta(seconds=START_SECONDS))
    mail.open(store)
    threading.Thread(target=_end_with_rank_0, args=(address,), daemon=True).start()
    try:
        _run_steps(setting, executor, mail)
    except SilentRankError as e:
        _say(store, f"report/{rank}", Report(problem=e.problem, of=e.rank))
    except Exception as e:  # noqa: BLE001  whatever it is, rank 0 says it
        _say(store, f"report/{rank}", Report(problem=f"failed: {type(e).__name__}: {e}"))


def _opened(setting: RemoteSetting, rank: int) -> tuple[CpuExecutor, Mail]:
    if setting.isa not in isas():
        raise EnginewrightError(f"its processor has no {setting.isa}, the instruction set of rank 0")
    bundle = Bundle.open(setting.bundle)
    lowered = partition(bundle.program(setting.target), Partition.parse(setting.partition))[rank]
    check_same(facts(bundle, setting.isa, lowered), setting.same)
    mail = Mail(rank, setting.machines, setting.timeout)
    load: Load = "read" if setting.load == "read" else "map"
    further: dict[str, Any] = {"threads": setting.threads, "isa": setting.isa, "tuning": setting.tuning}
    part = lowered, _cpu.MessageExchange(rank, mail.move)
    return CpuExecutor(bundle, setting.blocks, load=load, target=setting.target, part=part, **further), mail


def _run_steps(setting: RemoteSetting, executor: CpuExecutor, mail: Mail) -> None:
    groups = [group.name for group in executor.cache_groups]
    alone = Partition.parse(setting.partition).pipeline == 1
    while True:
        step, copies = mail.next_step()
        executor.copy_blocks(unpacked_copies(groups, copies))
        moved = mail.moved
        try:
            executor.program.run_packed(step)
        except ValueError:
            if not alone or mail.moved != moved:
                raise
            # Its inputs are wrong: all ranks see that before they exchange anything, and rank 0 says so.


def _say(store: TCPStore, key: str, what: Record) -> None:
    store.set(key, msgspec.json.encode(what).decode())


def _end_with_rank_0(address: str) -> None:
    """Ends this process when the store says so, or is gone."""
    try:
        store = join(address)
        while not store.check([END]):
            time.sleep(_LOOK_SECONDS)
    finally:
        os._exit(0)


def main() -> None:
    """Runs the rank that the command line names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is rank 0's
    address, rank = sys.argv[1:3]
    with contextlib.suppress(RuntimeError):  # rank 0 has gone
        serve_rank(address, int(rank))
    sys.stdout.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
