"""A folder as a tier: evicted blocks are written, and found ones are read where that is faster than computing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from enginewright.runtime.requests.block_keys import Item, Namespace
from enginewright.runtime.requests.block_tables import NO_BLOCK

from .block_store import BlockStore, Payload
from .kinds.base import CacheKind
from .prefix_index import Items
from .tier import Place, Tier

_FADING = 0.98
"""The factor by which the measured read time shrinks on each prefix that isn't read because the disk was slower.

So a disk is tried again after some time.
"""


@runtime_checkable
class BlockMemory(Protocol):
    """An executor whose blocks can be read and written between steps."""

    @property
    def cache_identity(self) -> bytes:
        """A text that is equal only for equal keys and values of equal tokens.

        It depends on the program, the weights, the instruction set and the order of sums.
        """

    def read_block(self, group: str, block: int) -> Payload:
        """Returns a copy of the memory of a block, in all layers of its cache group ``group``."""

    def write_block(self, group: str, block: int, payload: Payload) -> None:
        """Fills a block of the cache group ``group`` with a copy that ``read_block`` returned."""


class DiskTier(Tier):
    """Writes evicted blocks of the pools to a folder, and reads blocks that are found there.

    Args:
        store: the folder.
        memory: the executor that has the blocks of the pools.
        kinds, block_size: see ``Tier``.
    """

    def __init__(self, store: BlockStore, memory: BlockMemory, kinds: Iterable[CacheKind], block_size: int) -> None:
        super().__init__(store, kinds, block_size)
        self.store = store
        self.memory = memory
        self._sizes = {kind.name: len(memory.read_block(kind.name, 0)) for kind in self._kinds}

    @property
    def usable(self) -> bool:
        """True if records can be read: the folder had no problem so far."""
        return self.store.usable

    @property
    def writable(self) -> bool:
        """True if records can be saved: this process holds the lock of the folder."""
        return self.store.writable

    def has(self, name: bytes) -> bool:
        """Returns True if the folder has a record of this name; reading it may still fail."""
        return self.store.has(name)

    def save(self, name: bytes, namespace: Namespace, items: Items, blocks: Sequence[Place], *, wait: bool) -> None:
        """Implements ``Tier``. The record is written by a thread; without room in its queue, ``wait`` decides."""
        if not self.store.has(name):
            payloads = [self.memory.read_block(*place) for place in blocks]
            self.store.write(name, namespace, items, payloads, wait=wait)

    def load(self, name: bytes, items: Sequence[Item], blocks: Sequence[Place]) -> bool:
        """Fills blocks from a record. Returns False if it is missing, damaged or of other tokens."""
        payloads = self.store.read(name, items, [self._sizes[group] for group, _ in blocks])
        for (group, block), payload in zip(blocks, payloads or (), strict=payloads is not None):
            if block != NO_BLOCK:
                self.memory.write_block(group, block, payload)
        return payloads is not None

    def touch(self, names: Sequence[bytes]) -> None:
        """Marks records as used now. Among them the last one is deleted first."""
        self.store.used(names)

    def seconds(self, names: Sequence[bytes]) -> float:
        """Implements ``Tier``, by the measured seconds of earlier reads; 0 before the first."""
        return len(names) * (self.store.seconds_per_block or 0.0)

    def slower(self) -> None:
        """Implements ``Tier``: in a while a read is tried again."""
        if self.store.seconds_per_block is not None:
            self.store.seconds_per_block *= _FADING

    def delete(self, tenant: str | None) -> int:
        """Deletes the records of a tenant, or all if ``tenant`` is None. Returns the number of deleted files."""
        return self.store.delete(tenant)

    def flush(self) -> None:
        """Waits until all queued records are written or skipped, a minute at most."""
        self.store.flush()

    def close(self) -> None:
        """Implements ``Tier``: waits until all records are written."""
        self.store.close()

    def describe(self) -> dict[str, Any]:
        """Returns the facts about the folder, as "disk"."""
        return {"disk": self.store.describe()}
