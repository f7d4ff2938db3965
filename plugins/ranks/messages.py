"""Messages over TCP between ranks that share no memory.

The connections aren't encrypted or authenticated, so they belong on a private network. A rank reads and writes in the
thread that waits for the message. gloo of torch.distributed uses a thread of its own instead. With gloo a token of
SmolLM2 by tensor=2 took 143 ms over 10 Gbit/s on two cores, and with this module 22 ms (benchmarks/notes/ranks.md).
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from enginewright.runtime.shared.contracts import Int32Array, StepInput
from enginewright.runtime.shared.step_arrays import packed_words, unpacked_words
from enginewright.runtime.shared.step_schema import port_names

_FOREVER = timedelta(days=1000)
_STEPS, _VALUES = 1, 2  # tags of messages
_FIRST = 4096  # bytes of a step's first message; what doesn't fit into it is in a second one
_SIZES = 2  # int64 that it begins with: bytes of the step, and of the blocks to copy

Bytes = npt.NDArray[np.uint8]


class SilentRankError(Exception):
    """An error of a rank that sends nothing, or can't be reached; ``rank`` is its number."""

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(problem)
        self.rank, self.problem = rank, problem


class LostRanksError(Exception):
    """An error of a collective: some rank sends nothing, or can't be reached, but it is unknown which."""


class Mail:
    """The messages that one rank exchanges with the others.

    Args:
        rank: the number of this rank.
        machines: the address of each rank's machine.
        timeout: the seconds to wait for a message.

    Attributes:
        moved: the number of calls of ``move``, in which programs exchange values.
        sent_bytes: the bytes that were sent in them.
    """

    def __init__(self, rank: int, machines: Sequence[str], timeout: float) -> None:
        self._rank, self._machines, self._seconds = rank, machines, timeout
        self._patience = timedelta(seconds=timeout)
        self._group: Connections | None = None
        self._unread: deque[tuple[Bytes, list[tuple[int, Any]]]] = deque()
        self.moved = self.sent_bytes = 0

    def open(self, store: TCPStore) -> None:
        """Connects to all other ranks, which must call it too. Raises RuntimeError if one doesn't in time."""
        self._group = Connections(store, self._rank, self._machines, max(self._seconds, 30.0))

    def close(self) -> None:
        """Closes the connections to other ranks. A rank that waits for a message of this one gets an error."""
        if self._group is not None:
            self._group.close()

    def move(self, to: list[int], own: Bytes, sources: list[int], theirs: list[Bytes]) -> None:
        """Sends ``own`` to the ranks ``to``, and fills each array in ``theirs`` with the message of the rank in
        ``sources``.

        It is the ``move`` of `_cpu.MessageExchange`. Raises SilentRankError.
        """
        self.moved += 1
        self.sent_bytes += len(to) * own.size
        received = [self._receive(array, source, _VALUES) for array, source in zip(theirs, sources, strict=True)]
        sending = []
        if to and not sources:  # no answer says when it was read: so it must stay
            self._send_later(own.copy(), to, _VALUES)
        elif to:
            sending = self._send(own, to, _VALUES)
        self._finish(received)  # first: what is sent both ways at a time is read meanwhile
        self._finish(sending)

    def post(self, step: Bytes, copies: Bytes) -> None:
        """Sends a step, and the blocks to copy, to all others; only rank 0 calls it.

        Raises SilentRankError if a rank doesn't receive earlier steps.
        """
        others = [rank for rank in range(len(self._machines)) if rank != self._rank]
        head = np.array([step.size, copies.size], np.int64).view(np.uint8)
        whole = np.concatenate([head, step, copies])
        first = np.zeros(_FIRST, np.uint8)
        first[: whole.size] = whole[:_FIRST]
        self._send_later(first, others, _STEPS)
        if whole.size > _FIRST:
            self._send_later(whole[_FIRST:].copy(), others, _STEPS)

    def next_step(self) -> tuple[Bytes, Bytes]:
        """Waits, without a time limit, for the next step. Returns its bytes and those of the copies.

        Raises SilentRankError if rank 0 has ended.
        """
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

    def _send(self, message: Bytes, to: Sequence[int], tag: int) -> list[tuple[int, Any]]:
        assert self._group is not None
        works = []
        for rank in to:
            with self._silent(rank):
                works.append((rank, self._group.send(message, rank, tag)))
        return works

    def _send_later(self, message: Bytes, to: Sequence[int], tag: int) -> None:
        """Starts sending a message without waiting for its end. If many messages are unfinished, it waits for the
        oldest.
        """
        self._unread.append((message, self._send(message, to, tag)))
        while len(self._unread) > 4 * len(self._machines):
            self._finish(self._unread.popleft()[1])

    def _receive(self, array: Bytes, source: int, tag: int) -> tuple[int, Any]:
        assert self._group is not None
        with self._silent(source):
            return source, self._group.recv(array, source, tag)

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


_HELLO = struct.Struct("<32sii")
"""The first bytes of a connection: the secret, the rank that connects, and the tag of its messages."""


class Connections:
    """The TCP connections of one rank: one to each other rank for each tag.

    A tag names a sequence of messages. The methods raise RuntimeError if another rank can't be reached.

    Args:
        store: a store that all ranks have joined, with each rank's address, and the secret with which connections
            begin.
        rank: the number of this rank.
        machines: the address of each rank's machine.
        seconds: the maximum time to wait for the others.
    """

    def __init__(self, store: TCPStore, rank: int, machines: Sequence[str], seconds: float) -> None:
        self._links: dict[tuple[int, int], _Link] = {}
        limit = time.monotonic() + seconds
        if rank == 0:
            store.set("secret", secrets.token_hex(16))
        secret = store.get("secret")
        try:
            family = socket.getaddrinfo(machines[rank], 0, type=socket.SOCK_STREAM)[0][0]
            with socket.create_server((machines[rank], 0), family=family, backlog=2 * len(machines)) as listener:
                store.set(f"port/{rank}", str(listener.getsockname()[1]))
                for other in range(rank):
                    port = int(store.get(f"port/{other}"))
                    for tag in (_STEPS, _VALUES):
                        connection = socket.create_connection((machines[other], port), timeout=seconds)
                        connection.sendall(_HELLO.pack(secret, rank, tag))
                        self._links[other, tag] = _Link(connection)
                while len(self._links) < 2 * (len(machines) - 1):
                    listener.settimeout(max(0.01, limit - time.monotonic()))
                    self._accept(listener, secret, limit)
        except OSError as e:
            self.close()
            raise RuntimeError(str(e)) from e

    def _accept(self, listener: socket.socket, secret: bytes, limit: float) -> None:
        """Accepts a connection if it begins with the secret, and otherwise closes it. ``limit`` is a time of
        ``time.monotonic``.
        """
        connection, _ = listener.accept()
        connection.settimeout(max(0.01, min(5.0, limit - time.monotonic())))
        hello = b""
        with contextlib.suppress(OSError):
            hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        proof, other, tag = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0, 0)
        if hmac.compare_digest(proof, secret) and (other, tag) not in self._links:
            self._links[other, tag] = _Link(connection)
        else:
            connection.close()

    def send(self, message: Bytes, rank: int, tag: int) -> _Sending:
        """Starts to send a message. It mustn't change until ``wait`` of the result has returned."""
        return self._links[rank, tag].send(message.data)

    def recv(self, array: Bytes, rank: int, tag: int) -> _Receiving:
        """Returns the receiving of the next message of a rank into ``array``; its ``wait`` reads the message."""
        return _Receiving(self._links[rank, tag].socket, array.data)

    def close(self) -> None:
        """Closes all connections."""
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.socket.shutdown(socket.SHUT_RDWR)


class _Link:
    """This rank's end of one connection."""

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        self._lock, self._unsent = threading.Lock(), deque[_Sending]()
        weakref.finalize(self, made.close)
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Of a machine that is switched off nobody hears: after 25 s it counts as gone.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: memoryview) -> _Sending:
        """Sends the bytes that the system accepts at once. A thread sends the rest, if there is any."""
        sending = _Sending(message)
        with self._lock:
            if not self._unsent:
                self._push(sending)
            if not sending.done.is_set():
                self._unsent.append(sending)
                if len(self._unsent) == 1:
                    threading.Thread(target=self._send_rest, name="ranks' messages", daemon=True).start()
        return sending

    def _push(self, sending: _Sending) -> None:
        """Sends as many bytes as the system accepts now."""
        try:
            while sending.left:
                sending.left = sending.left[self.socket.send(sending.left) :]
        except BlockingIOError:
            return
        except OSError as e:
            sending.problem = str(e)
        sending.done.set()

    def _send_rest(self) -> None:
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        while True:
            poll.poll(1000)
            with self._lock:
                while self._unsent:
                    self._push(self._unsent[0])
                    if not self._unsent[0].done.is_set():
                        break
                    self._unsent.popleft()
                if not self._unsent:
                    return


class _Sending:
    """A message that is being sent."""

    def __init__(self, message: memoryview) -> None:
        self.left, self.problem, self.done = message, "", threading.Event()

    def wait(self, limit: timedelta) -> None:
        """Waits until the system has accepted all bytes. Raises RuntimeError if that fails or takes longer than
        ``limit``.
        """
        if not self.done.wait(min(limit.total_seconds(), threading.TIMEOUT_MAX)):
            raise RuntimeError("it takes nothing")
        if self.problem:
            raise RuntimeError(self.problem)


class _Receiving:
    """A message that is expected."""

    def __init__(self, link: socket.socket, array: memoryview) -> None:
        self._socket, self._left = link, array

    def wait(self, limit: timedelta) -> None:
        """Reads the message. Raises RuntimeError if it doesn't arrive in time, or the other rank has ended."""
        until = time.monotonic() + limit.total_seconds()
        try:
            while self._left:
                try:
                    count = self._socket.recv_into(self._left)
                except BlockingIOError:
                    left = until - time.monotonic()
                    if left <= 0:
                        raise RuntimeError("nothing came") from None
                    poll = select.poll()
                    poll.register(self._socket, select.POLLIN)
                    poll.poll(min(left, 3600.0) * 1000)
                    continue
                if not count:
                    raise RuntimeError("the connection was closed")
                self._left = self._left[count:]
        except OSError as e:
            raise RuntimeError(str(e)) from e


def packed_step(groups: Sequence[str], step: StepInput, ports: Sequence[str] = ()) -> Bytes:
    """Returns a step as bytes, for ranks that don't sample.

    ``groups`` has the names of the cache groups in order; ``ports`` names further arrays, as in ``ExecutorCaps.ports``.
    """
    words = packed_words(step, port_names(groups, ports))
    none = np.zeros(0, np.int32)
    blocks = [of.get(group, none) for of in (step.clears, step.copies) for group in groups]
    words.append(np.array([array.size for array in blocks], np.int32))
    return np.concatenate([*words, *(array.reshape(-1) for array in blocks)]).astype(np.int32).view(np.uint8)


def unpacked_step(groups: Sequence[str], packed: Bytes, ports: Sequence[str] = ()) -> StepInput:
    """Returns the step that ``packed_step`` packed, without sampling options and without requested outputs."""
    numbers = packed.copy().view(np.int32)
    arrays, at = unpacked_words(numbers, port_names(groups, ports))
    count = 2 * len(groups)
    sizes, blocks = numbers[at : at + count], numbers[at + count :]
    lists = np.split(blocks, np.cumsum(sizes)[:-1]) if count else []
    clears, copies = (dict(zip(groups, part, strict=True)) for part in (lists[: len(groups)], lists[len(groups) :]))
    return StepInput(
        arrays,
        clears={g: blocks for g, blocks in clears.items() if blocks.size},
        copies={g: pairs.reshape(-1, 2) for g, pairs in copies.items() if pairs.size},
    )


def packed_copies(groups: Sequence[str], copies: Mapping[str, Int32Array]) -> Bytes:
    """Returns a step's ``copies`` as bytes: for each cache group the number of pairs, then the pairs (from, to)."""
    none = np.zeros((0, 2), np.int32)
    lists = [copies.get(group, none).reshape(-1) for group in groups]
    parts = [np.array([pairs.size // 2, *pairs], np.int32) for pairs in lists]
    return np.concatenate(parts).view(np.uint8) if copies else np.zeros(0, np.uint8)


def unpacked_copies(groups: Sequence[str], packed: Bytes) -> dict[str, Int32Array]:
    """Returns the copies that ``packed_copies`` packed."""
    numbers, at, copies = packed.copy().view(np.int32), 0, dict[str, Int32Array]()
    for group in groups if packed.size else ():
        end = at + 1 + 2 * int(numbers[at])
        if end > at + 1:
            copies[group] = numbers[at + 1 : end].reshape(-1, 2)
        at = end
    return copies
