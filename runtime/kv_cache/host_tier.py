"""Main memory as a tier of a device's pools: evicted blocks are copied there, and back when a request needs them."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec

from enginewright.runtime.requests.block_keys import Item, Namespace
from enginewright.runtime.requests.block_tables import NO_BLOCK

from ..shared.errors import CapacityError
from ..shared.memory import format_bytes
from .block_store import Payload
from .disk_tier import DiskTier
from .kinds.base import CacheKind, numbers_found_as
from .prefix_index import Items, Node
from .record_names import HASH_BYTES, RecordNames
from .tier import Found, Place, Tier


@runtime_checkable
class HostCopies(Protocol):
    """An executor that keeps copies of its blocks in main memory. Copies are made in the order of the calls, after all
    submitted steps, and before the next one. A call doesn't wait for its copy.
    """

    def copy_bytes(self, group: str) -> int:
        """Returns the bytes of a block's copy."""

    def open_copies(self, counts: Mapping[str, int]) -> None:
        """Reserves memory for a number of copies in each cache group. Raises CapacityError if there is too little."""

    def save_copy(self, group: str, block: int, slot: int) -> None:
        """Copies a block to the group's copy ``slot``."""

    def load_copy(self, group: str, slot: int, block: int) -> None:
        """Copies the group's copy ``slot`` to a block."""

    def read_copy(self, group: str, slot: int) -> Payload:
        """Returns the bytes of a copy, as ``BlockMemory.read_block`` does."""


class _Record(msgspec.Struct, frozen=True):
    """The tokens of a record, and its copy in each of its cache groups."""

    namespace: Namespace
    items: Items
    slots: Mapping[str, int]


@dataclass
class HostUse:
    """Counts of the tier so far.

    Attributes:
        saved, loaded: records that were copied to main memory, and back.
        evicted: records that gave their memory to others.
    """

    saved: int = 0
    loaded: int = 0
    evicted: int = 0


class HostTier(Tier):
    """Keeps records of evicted blocks in main memory, up to a number of bytes; the least recently used are evicted.

    With a folder, records that are evicted here are written to it, and records that aren't here are read from it.

    Args:
        memory: the executor.
        size: the bytes of all records.
        kinds, block_size: see ``Tier``.
        blocks: cache group -> the number of blocks in its pool. Keys and values, and states of recurrent layers, get
            memory in the proportion that they have in the pools.
        disk: the folder; None for none.

    Raises CapacityError if ``size`` has no room for a block of each group, or if there isn't enough main memory.
    """

    def __init__(
        self,
        memory: HostCopies,
        size: int,
        kinds: Iterable[CacheKind],
        block_size: int,
        blocks: Mapping[str, int],
        disk: DiskTier | None = None,
    ) -> None:
        names = RecordNames(secrets.token_bytes(HASH_BYTES), b"") if disk is None else disk.names
        super().__init__(names, kinds, block_size)
        self.use = HostUse()
        self._memory, self._disk, self._closed = memory, disk, False
        self._bytes = {kind.name: memory.copy_bytes(kind.name) for kind in self._kinds}
        counts = self._counts(size, blocks)
        memory.open_copies(counts)
        self._free = {name: list(range(count)) for name, count in counts.items()}
        self._copies: dict[bytes, _Record] = {}
        self._order = {name: OrderedDict[bytes, None]() for name in counts}  # of each group; oldest use first

    @property
    def usable(self) -> bool:
        """True if records can be read: until ``close``."""
        return not self._closed

    @property
    def writable(self) -> bool:
        """True if records can be saved: until ``close``."""
        return not self._closed

    def has(self, name: bytes) -> bool:
        """Returns True if there is a record of this name, here or in the folder; reading it may still fail."""
        return name in self._copies or (self._disk is not None and self._disk.usable and self._disk.has(name))

    def in_memory(self, name: bytes) -> bool:
        """Returns True if the record is in main memory; False if it is only in the folder."""
        return name in self._copies

    def save(self, name: bytes, namespace: Namespace, items: Items, blocks: Sequence[Place], *, wait: bool) -> None:
        """Implements ``Tier``. With ``wait`` the record is written to the folder, if there is one, and not here."""
        if wait:
            if self._disk is not None and self._disk.writable:
                self._disk.save(name, namespace, items, blocks, wait=True)
            return
        if name in self._copies:
            return
        slots: dict[str, int] = {}
        try:
            for group, block in blocks:
                while not self._free[group]:
                    self._evict(next(iter(self._order[group])))
                slots[group] = self._free[group].pop()
                self._memory.save_copy(group, block, slots[group])
        except BaseException:
            self._release(slots)
            raise
        self._copies[name] = _Record(namespace, items, slots)
        for group in slots:
            self._order[group][name] = None
        self.use.saved += 1

    def load(self, name: bytes, items: Sequence[Item], blocks: Sequence[Place]) -> bool:
        """Fills blocks from a record, here or in the folder; returns False if it is missing or damaged."""
        record = self._copies.get(name)
        if record is None:
            return self._disk is not None and self._disk.usable and self._disk.load(name, items, blocks)
        if record.items != tuple(items) or record.slots.keys() != {group for group, _ in blocks}:
            return False
        try:
            for group, block in blocks:
                if block != NO_BLOCK:
                    self._memory.load_copy(group, record.slots[group], block)
        except BaseException:
            self._forget(name)
            raise
        self.use.loaded += 1
        return True

    def find(self, parent: Node, items: Sequence[Item], size: int) -> Found:
        """Implements ``Tier``. The records here are marked as used: blocks that are evicted to make room for them must
        not take their memory.
        """
        stored = super().find(parent, items, size)
        self._move_to_end([*stored.names, *(self.names.states(name) for name in stored.names[-1:])])
        return stored

    def touch(self, names: Sequence[bytes]) -> None:
        """Marks records, here or in the folder, as used now. Among them the last one is evicted first."""
        self._move_to_end(names)
        if self._disk is not None:
            self._disk.touch([name for name in names if name not in self._copies])

    def seconds(self, names: Sequence[bytes]) -> float:
        """Implements ``Tier``. Copies in main memory take no time: any is faster than computing."""
        if self._disk is None:
            return 0.0
        return self._disk.seconds([name for name in names if name not in self._copies])

    def slower(self) -> None:
        """Tells the folder, if there is one, that reading was slower than computing."""
        if self._disk is not None:
            self._disk.slower()

    def delete(self, tenant: str | None) -> int:
        """Deletes records, here and in the folder: those of a tenant, or all for None. Returns the number of files."""
        for name in [name for name, record in self._copies.items() if tenant in (None, record.namespace.tenant)]:
            self._forget(name)
        return 0 if self._disk is None else self._disk.delete(tenant)

    def spill(self) -> None:
        """Writes the records in main memory to the folder, if there is one. Waits for room in its queue."""
        for name in list(dict.fromkeys(name for order in self._order.values() for name in order)):
            self._write(name, wait=True)

    def flush(self) -> None:
        """Waits until the files of the folder, if there is one, are written."""
        if self._disk is not None:
            self._disk.flush()

    def close(self) -> None:
        """Implements ``Tier``. The executor frees the memory when it is closed."""
        self._closed = True
        self._copies.clear()
        if self._disk is not None:
            self._disk.close()

    def describe(self) -> dict[str, Any]:
        """Returns the use of main memory as "host", and that of the folder, if there is one, as "disk"."""
        used = sum(self._bytes[group] * len(order) for group, order in self._order.items())
        total = used + sum(self._bytes[group] * len(free) for group, free in self._free.items())
        host = {**vars(self.use), "records": len(self._copies), "bytes": used, "total_bytes": total}
        return {"host": host, **({} if self._disk is None else self._disk.describe())}

    def _counts(self, size: int, blocks: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of copies in each cache group that ``size`` bytes have room for: one, and a share of the
        rest.
        """
        ways = (numbers_found_as("blocks", self._kinds), numbers_found_as("copies", self._kinds))
        parts = [names for numbers in ways if (names := [self._kinds[i].name for i in numbers])]
        least = sum(self._bytes.values())
        if size < least:
            raise CapacityError(
                f"prefix_memory: {format_bytes(size)} has no room for a block, which takes {format_bytes(least)}",
                hint=f"Pass {format_bytes(least)} or more.",
            )
        pools = sum(self._bytes[name] * blocks[name] for name in self._bytes)
        counts: dict[str, int] = {}
        for names in parts:
            share = sum(self._bytes[name] * blocks[name] for name in names) / pools
            one = sum(self._bytes[name] for name in names)
            counts |= dict.fromkeys(names, 1 + int((size - least) * share) // one)
        return counts

    def _move_to_end(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):
            if (record := self._copies.get(name)) is not None:
                for group in record.slots:
                    self._order[group].move_to_end(name)

    def _evict(self, name: bytes) -> None:
        try:
            self._write(name, wait=False)
        finally:
            self._forget(name)
            self.use.evicted += 1

    def _write(self, name: bytes, *, wait: bool) -> None:
        """Writes a record to the folder, if there is one that doesn't have it."""
        if self._disk is None or not self._disk.writable or self._disk.has(name):
            return
        record = self._copies[name]
        payloads = [self._memory.read_copy(group, slot) for group, slot in record.slots.items()]
        self._disk.store.write(name, record.namespace, record.items, payloads, wait=wait)

    def _forget(self, name: bytes) -> None:
        record = self._copies.pop(name)
        for group in record.slots:
            del self._order[group][name]
        self._release(record.slots)

    def _release(self, slots: Mapping[str, int]) -> None:
        for group, slot in slots.items():
            self._free[group].append(slot)
