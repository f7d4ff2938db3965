"""A disk whose records are objects in memory: writes become visible late, reads fail, as the scenario says."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from enginewright.runtime.kv_cache.block_store import Payload, StoreUse
from enginewright.runtime.kv_cache.record_names import RecordNames
from enginewright.runtime.requests.block_keys import Item, Namespace

from .model import mix

Record = tuple[Namespace, tuple[Item, ...], list[Payload]]
"""A namespace, the items of a block, and its payloads."""


class Folder:
    """The records of a folder. They outlive the engine that wrote them."""

    def __init__(self) -> None:
        self.records: OrderedDict[bytes, Record] = OrderedDict()


class SimulatedStore(RecordNames):
    """A ``kv_cache.block_store.BlockStore`` in memory, for a ``DiskTier``.

    Args:
        folder: its records.
        seed: seed of faults, and of delays of writes.
        fails: of 16 reads or writes, the number that fail.
        seconds: duration of a read.
        took: called with the seconds and the number of tokens of each read.
        most: most records.
    """

    def __init__(
        self,
        folder: Folder,
        seed: int,
        fails: int = 0,
        seconds: float = 1e-4,
        took: Callable[[float, int], None] = lambda seconds, tokens: None,
        most: int = 64,
    ) -> None:
        super().__init__(b"", b"")
        self.folder = folder
        self.use = StoreUse()
        self.problem: str | None = None
        self.seconds_per_block: float | None = None
        self.usable = self.writable = True
        self._seed, self._fails, self._seconds, self._took, self._most = seed, fails, seconds, took, most
        self._calls = 0
        self._waiting: deque[tuple[bytes, Record]] = deque()

    def has(self, name: bytes) -> bool:
        """Returns True if a record was written; some waiting writes are done first."""
        self._write_some()
        return name in self.folder.records

    def read(self, name: bytes, items: Sequence[Item], sizes: Sequence[int]) -> list[Payload] | None:
        """Reads a record; None if it is missing, another one, or the read fails."""
        if name not in self.folder.records:
            return None
        self._took(self._seconds, len(items))
        _, known, payloads = self.folder.records[name]
        if self._failing() or known != tuple(items) or [len(one) for one in payloads] != list(sizes):
            del self.folder.records[name]
            self.use.refused += 1
            return None
        self.seconds_per_block = self._seconds
        self.use.read += 1
        return [payload.copy() for payload in payloads]

    def write(
        self,
        name: bytes,
        namespace: Namespace,
        items: Sequence[Item],
        payloads: list[Payload],
        *,
        wait: bool = False,
    ) -> None:
        """Queues a record to be written, unless it is known; with ``wait``, writes it at once."""
        if name in self.folder.records or any(name == other for other, _ in self._waiting):
            return
        if self._failing() and not wait:
            self.use.skipped += 1
            return
        self._waiting.append((name, (namespace, tuple(items), payloads)))

    def used(self, names: Sequence[bytes]) -> None:
        """Moves records to the end, so that they are deleted last."""
        for name in reversed(names):
            if name in self.folder.records:
                self.folder.records.move_to_end(name)

    def delete(self, tenant: str | None = None) -> int:
        """Deletes a tenant's records, or all; returns their number."""
        self.flush()
        gone = [n for n, (of, _, _) in self.folder.records.items() if tenant in (None, of.tenant)]
        for name in gone:
            del self.folder.records[name]
        return len(gone)

    def flush(self) -> None:
        """Writes all waiting records."""
        while self._waiting:
            self._write_one()

    def close(self) -> None:
        """Writes all waiting records and ends the use of the store."""
        self.flush()
        self.usable = self.writable = False

    def describe(self) -> dict[str, object]:
        """The counters of its use."""
        return dict(vars(self.use))

    def _number(self) -> int:
        self._calls += 1
        return mix(self._seed * 1000003 + self._calls)

    def _failing(self) -> bool:
        return self._fails > 0 and self._number() % 16 < self._fails

    def _write_some(self) -> None:
        while self._waiting and self._number() % 3:
            self._write_one()

    def _write_one(self) -> None:
        name, record = self._waiting.popleft()
        while len(self.folder.records) >= self._most:
            self.folder.records.popitem(last=False)
            self.use.deleted += 1
        self.folder.records[name] = record
        self.use.written += 1
