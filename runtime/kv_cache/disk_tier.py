"""Between the blocks of the pool and those of a folder: what is evicted is written, what is found there is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from enginewright.runtime.requests.block_keys import Item
from enginewright.runtime.requests.block_tables import NO_BLOCK

from .block_store import BlockStore, Payload
from .prefix_index import Node

_FADING = 0.98
"""A disk that was slower than computing isn't read. Each time, its measured seconds are multiplied by this, so that it
is tried again some day."""


@runtime_checkable
class BlockMemory(Protocol):
    """An executor whose blocks can be read and written between steps."""

    @property
    def cache_identity(self) -> bytes:
        """The bytes of all that keys and values depend on but tokens: program, weights, instruction set, order of
        sums."""

    def read_block(self, group: str, block: int) -> Payload:
        """A copy of a block's memory in all layers."""

    def write_block(self, group: str, block: int, payload: Payload) -> None:
        """Gives a block the memory that ``read_block`` gave."""


class DiskTier:
    """Writes evicted blocks of the pools to a folder, and reads blocks that are found there.

    Args:
        store: the folder.
        memory: of the pools.
        groups: their names, in the order of nodes' blocks.
        block_size: tokens of a block.
    """

    def __init__(self, store: BlockStore, memory: BlockMemory, groups: Sequence[str], block_size: int) -> None:
        self.store = store
        self.memory = memory
        self.seconds_per_token: float | None = None  # of computing, so far
        self._groups = tuple(groups)
        self._block_size = block_size
        self._sizes = [len(memory.read_block(name, 0)) for name in groups]

    def computed(self, tokens: int, seconds: float) -> None:
        """A step took so long; what a token of a long prompt costs follows from steps of many."""
        if tokens >= 32:
            each, before = seconds / tokens, self.seconds_per_token
            self.seconds_per_token = each if before is None else 0.9 * before + 0.1 * each

    def leaving(self, node: Node, *, wait: bool = False) -> None:
        """A block of a node is about to be evicted: while all are there, and full, they are written."""
        whole = len(node.items) == self._block_size and NO_BLOCK not in node.blocks
        if whole and self.store.writable and not self.holds(node):
            payloads = [self.memory.read_block(*at) for at in zip(self._groups, node.blocks, strict=True)]
            self.store.write(self._name(node), node.namespace, node.items, payloads, wait=wait)

    def holds(self, node: Node) -> bool:
        """Returns True if a node's block is in the folder."""
        return self.store.has(self._name(node))

    def find(self, parent: Node, items: Sequence[Item], size: int) -> list[bytes]:
        """Names of whole blocks of ``items`` after ``parent`` that are there; none if computing them is faster."""
        if not self.store.usable:
            return []
        names, name = [], self._name(parent)
        for at in range(0, len(items) - size + 1, size):
            name = self.store.child(name, items[at : at + size])
            if not self.store.has(name):
                break
            names.append(name)
        each = self.store.seconds_per_block
        if names and each is not None and self.seconds_per_token is not None and each > size * self.seconds_per_token:
            self.store.seconds_per_block = each * _FADING
            return []
        return names

    def read(self, name: bytes, items: Sequence[Item], blocks: Sequence[int]) -> bool:
        """Fills blocks, one a group, NO_BLOCK for none. False if the record isn't there, or can't be believed."""
        payloads = self.store.read(name, items, self._sizes)
        if payloads is None:
            return False
        for group, block, payload in zip(self._groups, blocks, payloads, strict=True):
            if block != NO_BLOCK:
                self.memory.write_block(group, block, payload)
        return True

    def used(self, names: Sequence[bytes]) -> None:
        """Notes that records of a prefix were of use; see ``BlockStore.used``."""
        self.store.used(names)

    def describe(self) -> dict[str, object]:
        """Returns what ``LLM.info`` says of the folder."""
        return self.store.describe()

    def _name(self, node: Node) -> bytes:
        above = [node]
        while above[-1].name is None and (parent := above[-1].parent) is not None:
            above.append(parent)
        for each in reversed(above):
            if each.name is None:
                known = None if each.parent is None else each.parent.name
                each.name = self.store.root(each.namespace) if known is None else self.store.child(known, each.items)
        assert node.name is not None
        return node.name
