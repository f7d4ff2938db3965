"""Moves blocks between the pools and a folder: evicted blocks are written, and found ones are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from enginewright.runtime.requests.block_keys import Item
from enginewright.runtime.requests.block_tables import NO_BLOCK

from .block_store import BlockStore, Payload
from .kinds.base import CacheKind, numbers_found_as
from .prefix_index import Node

_FADING = 0.98
"""A disk that was slower than computing isn't read. Each time, its measured seconds are multiplied by this factor, so
that it is tried again later."""


@runtime_checkable
class BlockMemory(Protocol):
    """An executor whose blocks can be read and written between steps."""

    @property
    def cache_identity(self) -> bytes:
        """A text that differs if keys and values of the same tokens may differ: of the program, the weights, the
        instruction set and the order of sums.
        """

    def read_block(self, group: str, block: int) -> Payload:
        """Returns a copy of a block's memory in all layers of the group."""

    def write_block(self, group: str, block: int, payload: Payload) -> None:
        """Fills a block with memory that ``read_block`` returned."""


class DiskTier:
    """Writes evicted blocks of the pools to a folder, and reads blocks that are found there.

    A record has the keys and values of a block of tokens. With recurrent layers another record has the states after
    these tokens, if there is a snapshot at the end of the block.

    Args:
        store: the folder.
        memory: the executor that has the blocks of the pools.
        kinds: the kinds of the cache groups, in the order of nodes' blocks.
        block_size: tokens of a block.
    """

    def __init__(self, store: BlockStore, memory: BlockMemory, kinds: Iterable[CacheKind], block_size: int) -> None:
        self.store = store
        self.memory = memory
        self.seconds_per_token: float | None = None  # of computing, so far
        self._kinds = tuple(kinds)
        self._keys = numbers_found_as("blocks", self._kinds)
        self._states = numbers_found_as("copies", self._kinds)
        self._block_size = block_size
        self._sizes = [len(memory.read_block(kind.name, 0)) for kind in self._kinds]

    def computed(self, tokens: int, seconds: float) -> None:
        """Updates the estimated seconds of a prompt token from a step; steps of few tokens are ignored.

        Args:
            tokens: the tokens of the step.
            seconds: the time that it took.
        """
        if tokens >= 32:
            each, before = seconds / tokens, self.seconds_per_token
            self.seconds_per_token = each if before is None else 0.9 * before + 0.1 * each

    def leaving(self, node: Node, *, wait: bool = False) -> None:
        """Writes the blocks and states of a node, one of whose blocks is about to be evicted, if the node is full.

        ``wait``: True waits for room in the store's queue; False writes nothing if there is no room.
        """
        if len(node.items) < self._block_size or not self.store.writable:
            return
        name = self._name(node)
        for record, blocks, groups in (
            (name, node.blocks, self._keys),
            (self.store.states(name), node.states.get(self._block_size, ()), self._states),
        ):
            written = [(self._kinds[i].name, blocks[i]) for i in groups if blocks and blocks[i] != NO_BLOCK]
            if written and len(written) == len(groups) and not self.store.has(record):
                payloads = [self.memory.read_block(*at) for at in written]
                self.store.write(record, node.namespace, node.items, payloads, wait=wait)

    def known(self, parent: Node, items: Sequence[Item], size: int) -> list[bytes]:
        """Returns the names of the whole blocks of ``items`` after ``parent`` that are stored, ``size`` tokens each.

        With recurrent layers the last one is followed by a record of states.
        """
        names, end, name = list[bytes](), 0, self._name(parent)
        for at in range(0, len(items) - size + 1, size):
            name = self.store.child(name, items[at : at + size])
            if self._keys and not self.store.has(name):
                break
            names.append(name)
            if not self._states or self.store.has(self.store.states(name)):
                end = len(names)
        return names[:end]

    def find(self, parent: Node, items: Sequence[Item], size: int) -> list[bytes]:
        """Returns the names that `known` returns; none if computing these blocks is faster than reading them."""
        names = self.known(parent, items, size) if self.store.usable else []
        each, computed = self.store.seconds_per_block, self.seconds_per_token
        records = len(names) * bool(self._keys) + bool(self._states)
        if names and each is not None and computed is not None and each * records > len(names) * size * computed:
            self.store.seconds_per_block = each * _FADING
            return []
        return names

    def read(self, name: bytes, items: Sequence[Item], blocks: Sequence[int]) -> bool:
        """Fills blocks from the records of a block of tokens.

        Args:
            name: the name that `find` returned for the block of tokens.
            items: its items.
            blocks: the block of each group to fill; NO_BLOCK for none. A record without blocks to fill isn't read.

        Returns:
            False if a record is missing or damaged.
        """
        for record, groups in ((name, self._keys), (self.store.states(name), self._states)):
            filled = [i for i in groups if blocks[i] != NO_BLOCK]
            payloads = self.store.read(record, items, [self._sizes[i] for i in groups]) if filled else []
            if payloads is None:
                return False
            for i in filled:
                self.memory.write_block(self._kinds[i].name, blocks[i], payloads[groups.index(i)])
        return True

    def holds(self, node: Node) -> bool:
        """Returns True if the states at the end of a full node are stored."""
        return self.store.usable and self.store.has(self.store.states(self._name(node)))

    def read_states(self, node: Node, blocks: Sequence[int]) -> bool:
        """Fills blocks with the states at the end of a full node, as `read` does."""
        return self.read(self._name(node), node.items, blocks)

    def used(self, names: Sequence[bytes]) -> None:
        """Marks the blocks that `find` returned as used; see ``BlockStore.used``."""
        self.store.used([*names, *(self.store.states(name) for name in names[-1:])])

    def describe(self) -> dict[str, object]:
        """Returns the entry of ``LLM.info`` for the folder."""
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
