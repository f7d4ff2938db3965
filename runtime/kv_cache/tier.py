"""The base of tiers: they keep blocks that were evicted from the pools, and read those that requests look for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from enginewright.runtime.requests.block_keys import Item, Namespace
from enginewright.runtime.requests.block_tables import NO_BLOCK

from .kinds.base import CacheKind, numbers_found_as
from .prefix_index import Items, Node
from .record_names import RecordNames

Place = tuple[str, int]
"""A cache group and a block in its pool; NO_BLOCK for none."""


class Found(NamedTuple):
    """The records that continue a prefix.

    Attributes:
        names: the records of whole blocks in order. The last one may be of the first tokens of the next block instead.
        tokens: the number of tokens of all of them.
    """

    names: list[bytes]
    tokens: int


class Tier:
    """Keeps records of evicted blocks, and reads them into blocks of the pools. The classes that store them derive from
    this.

    A record has the keys and values of a block of tokens. With recurrent layers another record has the states after
    these tokens, if there is a snapshot at the end of the block. A snapshot within a block is one record with the keys
    and values of the block's first tokens.

    Args:
        names: names the records.
        kinds: the kinds of the cache groups, in the order of nodes' blocks.
        block_size: tokens of a block.
    """

    def __init__(self, names: RecordNames, kinds: Iterable[CacheKind], block_size: int) -> None:
        self.names = names
        self.seconds_per_token: float | None = None  # of computing, so far
        self._kinds = tuple(kinds)
        self._keys = numbers_found_as("blocks", self._kinds)
        self._states = numbers_found_as("copies", self._kinds)
        self._block_size = block_size

    @property
    def usable(self) -> bool:
        """Returns True if records can be read."""
        raise NotImplementedError

    @property
    def writable(self) -> bool:
        """Returns True if records can be saved."""
        raise NotImplementedError

    def has(self, name: bytes) -> bool:
        """Returns True if there is a record of this name; reading it may still fail."""
        raise NotImplementedError

    def save(self, name: bytes, namespace: Namespace, items: Items, blocks: Sequence[Place], *, wait: bool) -> None:
        """Saves blocks as a record, unless there is one; ``wait`` is that of `leaving`."""
        raise NotImplementedError

    def load(self, name: bytes, items: Sequence[Item], blocks: Sequence[Place]) -> bool:
        """Fills blocks from a record of these items; returns False if it is missing or damaged.

        Args:
            name: the record's name.
            items: the items of its tokens.
            blocks: its cache groups in order, with the block to fill.
        """
        raise NotImplementedError

    def touch(self, names: Sequence[bytes]) -> None:
        """Marks the records of a prefix, in its order, as used now, the last of them least."""
        raise NotImplementedError

    def seconds(self, names: Sequence[bytes]) -> float:
        """Returns the estimated seconds to read records."""
        raise NotImplementedError

    def slower(self) -> None:
        """Notes that reading was slower than computing, so nothing was read."""

    def delete(self, tenant: str | None) -> int:
        """Deletes the records of a tenant, or all if ``tenant`` is None; returns the number of deleted files."""
        raise NotImplementedError

    def spill(self) -> None:
        """Writes the records that are only in memory to a folder, if there is one."""

    def flush(self) -> None:
        """Waits until files are written."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the use of the records."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Returns the tier's entries of ``info()["prefix_cache"]``."""
        raise NotImplementedError

    def in_memory(self, name: bytes) -> bool:
        """Returns True if a record is in main memory."""
        return False

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
        """Saves a node's blocks and snapshots, because one of its blocks is about to be evicted.

        Keys and values are saved only if the node's block is full.

        Args:
            node: the node of the prefix index.
            wait: True writes files, and waits for room in their queue; False may write nothing.
        """
        for name, count, blocks in self._named(node) if self.writable else ():
            for record, groups in self._records(name, count):
                places = [(self._kinds[i].name, blocks[i]) for i in groups if blocks[i] != NO_BLOCK]
                if places and len(places) == len(groups):
                    self.save(record, node.namespace, node.items[:count], places, wait=wait)

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
            name = self.names.child(name, items[at : at + size])
            if self._keys and not self.has(name):
                break
            names.append(name)
        if not self._states:
            return Found(names, len(names) * size)
        for whole in range(len(names), -1, -1):
            before = names[:whole]
            name = before[-1] if before else self._name(parent)
            if part := self._part(name, items[whole * size : whole * size + size - 1]):
                return Found([*before, part[-1]], whole * size + len(part))
            if before and self.has(self.names.states(name)):
                return Found(before, whole * size)
        return Found([], 0)

    def find(self, parent: Node, items: Sequence[Item], size: int) -> Found:
        """Returns the result of `known`; no records if computing these tokens is faster than reading them."""
        stored = self.known(parent, items, size) if self.usable else Found([], 0)
        if not stored.names or self.seconds_per_token is None:
            return stored
        states = [self.names.states(stored.names[-1])] if self._states else []
        if self.seconds([*(stored.names if self._keys else ()), *states]) > stored.tokens * self.seconds_per_token:
            self.slower()
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
            places = [(self._kinds[i].name, blocks[i]) for i in groups]
            if any(block != NO_BLOCK for _, block in places) and not self.load(record, items, places):
                return False
        return True

    def holds(self, node: Node) -> bool:
        """Returns True if the states at the end of a node, whose block is full, are stored."""
        return self.usable and self.has(self.names.states(self._name(node)))

    def part(self, node: Node, items: Sequence[Item]) -> int:
        """Returns the length of the longest beginning of ``items`` whose snapshot is stored, less than a block; 0 for
        none.

        ``node`` is the node after which the items follow; its block is full.
        """
        return len(self._part(self._name(node), items)) if self.usable else 0

    def read_states(self, node: Node, blocks: Sequence[int]) -> bool:
        """Fills blocks with the states at the end of a node whose block is full.

        Returns False if the record is invalid.

        ``blocks`` has the block of each group; NO_BLOCK for groups without states.
        """
        return self.read(self._name(node), node.items, blocks)

    def states_in_memory(self, node: Node) -> bool:
        """Returns True if the states at the end of a full node are in main memory."""
        return self.in_memory(self.names.states(self._name(node)))

    def tokens_in_memory(self, found: Found) -> int:
        """Returns the number of tokens of the records in ``found`` that are in main memory."""
        if not self._keys:
            return found.tokens * self.in_memory(self.names.states(found.names[-1]))
        last = found.tokens - (len(found.names) - 1) * self._block_size
        return sum(
            last if name is found.names[-1] else self._block_size for name in found.names if self.in_memory(name)
        )

    def used(self, names: Sequence[bytes]) -> None:
        """Marks the records ``names``, which `find` returned, as used now, so that they are deleted later than
        others.
        """
        self.touch([*names, *(self.names.states(name) for name in names[-1:])])

    def _part(self, parent: bytes, items: Sequence[Item]) -> list[bytes]:
        """Returns the names for the first 1, 2, ... of ``items``, up to the longest beginning that has a record."""
        names = self.names.parts(parent, items)
        while names and not self.has(names[-1]):
            del names[-1]
        return names

    def _records(self, name: bytes, count: int) -> list[tuple[bytes, list[int]]]:
        """Returns the name of each record that stores ``count`` tokens, and the numbers of the groups that it contains.

        A whole block has a record of keys and one of states; the first tokens of a block have one record of both.
        """
        if count < self._block_size:
            return [(name, [*self._keys, *self._states])]
        return [(name, self._keys), (self.names.states(name), self._states)]

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
            names = self.names.parts(self._name(node.parent), node.items[: max(counts)])
            for count in counts:
                yield names[count - 1], count, _both(node.blocks, node.states[count])

    def _name(self, node: Node) -> bytes:
        key, above, name = self.names.key, [node], b""
        while not _has_name(above[-1], key) and (parent := above[-1].parent) is not None:
            above.append(parent)
        for each in reversed(above):
            if not _has_name(each, key):
                root = each.parent is None
                each.name = key, self.names.root(each.namespace) if root else self.names.child(name, each.items)
            assert each.name is not None
            name = each.name[1]
        return name


def _has_name(node: Node, key: bytes) -> bool:
    return node.name is not None and node.name[0] == key


def _both(keys: Sequence[int], states: Sequence[int]) -> list[int]:
    """Merges two lists of blocks by group: each group's block from ``states``; for groups without states, from
    ``keys``.
    """
    return [key if state == NO_BLOCK else state for key, state in zip(keys, states, strict=True)]
