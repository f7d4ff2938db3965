"""Moves blocks between the pools and a folder: evicted blocks are written, and found ones are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from enginewright.runtime.requests.block_keys import Item
from enginewright.runtime.requests.block_tables import NO_BLOCK

from .block_store import BlockStore, Payload
from .kinds.base import CacheKind, numbers_found_as
from .prefix_index import Node

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


class Found(NamedTuple):
    """The records on the disk that continue a prefix.

    Attributes:
        names: the records of whole blocks in order. The last one may be of the first tokens of the next block instead.
        tokens: the number of tokens of all of them.
    """

    names: list[bytes]
    tokens: int


class DiskTier:
    """Writes evicted blocks of the pools to a folder, and reads blocks that are found there.

    A record has the keys and values of a block of tokens. With recurrent layers another record has the states after
    these tokens, if there is a snapshot at the end of the block. A snapshot within a block is one record with the keys
    and values of the block's first tokens.

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
        """Writes a node's blocks and snapshots, because one of its blocks is about to be evicted.

        Keys and values are written only if the node's block is full.

        Args:
            node: the node of the prefix index.
            wait: True waits for room in the store's queue; False writes nothing if there is no room.
        """
        for name, count, blocks in self._named(node) if self.store.writable else ():
            for record, groups in self._records(name, count):
                written = [(self._kinds[i].name, blocks[i]) for i in groups if blocks[i] != NO_BLOCK]
                if written and len(written) == len(groups) and not self.store.has(record):
                    payloads = [self.memory.read_block(*at) for at in written]
                    self.store.write(record, node.namespace, node.items[:count], payloads, wait=wait)

    def known(self, parent: Node, items: Sequence[Item], size: int) -> Found:
        """Returns the records of the longest stored beginning of ``items``.

        With recurrent layers, it ends where states are stored: at the end of a block, or within one.

        Args:
            parent: the node after which the items follow.
            items: the items (tokens, or contents such as images).
            size: the items of a whole block.
        """
        names, name = list[bytes](), self._name(parent)
        for at in range(0, len(items) - size + 1, size):
            name = self.store.child(name, items[at : at + size])
            if self._keys and not self.store.has(name):
                break
            names.append(name)
        if not self._states:
            return Found(names, len(names) * size)
        for whole in range(len(names), -1, -1):
            before = names[:whole]
            name = before[-1] if before else self._name(parent)
            if part := self._part(name, items[whole * size : whole * size + size - 1]):
                return Found([*before, part[-1]], whole * size + len(part))
            if before and self.store.has(self.store.states(name)):
                return Found(before, whole * size)
        return Found([], 0)

    def find(self, parent: Node, items: Sequence[Item], size: int) -> Found:
        """Returns the result of `known`; no records if computing these tokens is faster than reading them."""
        stored = self.known(parent, items, size) if self.store.usable else Found([], 0)
        each, computed = self.store.seconds_per_block, self.seconds_per_token
        records = len(stored.names) * bool(self._keys) + bool(self._states)
        if stored.names and each is not None and computed is not None and each * records > stored.tokens * computed:
            self.store.seconds_per_block = each * _FADING
            return Found([], 0)
        return stored

    def read(self, name: bytes, items: Sequence[Item], blocks: Sequence[int]) -> bool:
        """Fills blocks from the records of a block of tokens, or of its first tokens.

        Args:
            name: the name that `find` returned for these tokens.
            items: their items.
            blocks: the block of each group to fill; NO_BLOCK for none. A record without blocks to fill isn't read.

        Returns:
            False if a record is missing or damaged.
        """
        for record, groups in self._records(name, len(items)):
            filled = [i for i in groups if blocks[i] != NO_BLOCK]
            payloads = self.store.read(record, items, [self._sizes[i] for i in groups]) if filled else []
            if payloads is None:
                return False
            for i in filled:
                self.memory.write_block(self._kinds[i].name, blocks[i], payloads[groups.index(i)])
        return True

    def holds(self, node: Node) -> bool:
        """Returns True if the disk has the states at the end of a node, whose block is full."""
        return self.store.usable and self.store.has(self.store.states(self._name(node)))

    def part(self, node: Node, items: Sequence[Item]) -> int:
        """Returns the length of the longest beginning of ``items`` whose snapshot is on the disk, less than a block; 0
        for none.

        ``node`` is the node after which the items follow; its block is full.
        """
        return len(self._part(self._name(node), items)) if self.store.usable else 0

    def read_states(self, node: Node, blocks: Sequence[int]) -> bool:
        """Fills blocks with the states at the end of a node whose block is full.

        Returns False if the record is invalid.

        ``blocks`` has the block of each group; NO_BLOCK for groups without states.
        """
        return self.read(self._name(node), node.items, blocks)

    def used(self, names: Sequence[bytes]) -> None:
        """Marks the records ``names``, which `find` returned, as used now, so that they are deleted later than
        others.
        """
        self.store.used([*names, *(self.store.states(name) for name in names[-1:])])

    def describe(self) -> dict[str, object]:
        """Returns the facts about the folder for ``LLM.info()``."""
        return self.store.describe()

    def _part(self, parent: bytes, items: Sequence[Item]) -> list[bytes]:
        """Returns the names for the first 1, 2, ... of ``items``, up to the longest beginning that has a record."""
        names = self.store.parts(parent, items)
        while names and not self.store.has(names[-1]):
            del names[-1]
        return names

    def _records(self, name: bytes, count: int) -> list[tuple[bytes, list[int]]]:
        """Returns the name of each record that stores ``count`` tokens, and the numbers of the groups that it contains.

        A whole block has a record of keys and one of states; the first tokens of a block have one record of both.
        """
        if count < self._block_size:
            return [(name, [*self._keys, *self._states])]
        return [(name, self._keys), (self.store.states(name), self._states)]

    def _named(self, node: Node) -> Iterator[tuple[bytes, int, Sequence[int]]]:
        """Yields (name, number of tokens, block of each group) for a node's full block and for each snapshot within
        it.
        """
        nothing = [NO_BLOCK] * len(node.blocks)
        if len(node.items) == self._block_size:
            yield self._name(node), self._block_size, _both(node.blocks, node.states.get(self._block_size, nothing))
        counts = [count for count in node.states if count < self._block_size]
        # The later tokens of a block that is used in part may have any numbers, but finite ones.
        keys = [(self._kinds[i].name, node.blocks[i]) for i in self._keys]
        if counts and node.parent is not None and not (keys and self._kinds[self._keys[0]].holder.doubted(keys)):
            names = self.store.parts(self._name(node.parent), node.items[: max(counts)])
            for count in counts:
                yield names[count - 1], count, _both(node.blocks, node.states[count])

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


def _both(keys: Sequence[int], states: Sequence[int]) -> list[int]:
    """Merges two lists of blocks by group: each group's block from ``states``; for groups without states, from
    ``keys``.
    """
    return [key if state == NO_BLOCK else state for key, state in zip(keys, states, strict=True)]
