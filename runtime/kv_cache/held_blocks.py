"""The KV blocks of each request, and the blocks that the next step copies or clears before it writes.

The kind of a group decides what its blocks hold, and for how long (``kinds``). A block that others read is never
written: the next step copies its used part. A block that may hold numbers that aren't finite is cleared before
another request gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from enginewright.runtime.requests.block_tables import NO_BLOCK
from enginewright.runtime.requests.request import Request

from ..shared.contracts import CacheGroup, ExecutorCaps, StepInput
from ..shared.step_schema import SLOTS, group_port
from .block_pool import BlockPool, pool_of
from .candidate import Candidate
from .kinds.base import CacheKind
from .kinds.table import kind_of

Copies = Mapping[str, Sequence[tuple[int, int]]]
"""Cache group -> (source, destination) of each block to copy."""
Pins = Sequence[tuple[str, int]]
"""Blocks that are pinned: cache group and block."""


class HeldBlocks:
    """The blocks of each request, by number; their memory is the executor's. Implements ``kinds.base.BlockHolder``.

    Args:
        groups: the cache groups of the program.
        blocks: cache group -> number of its blocks.
        caps: the executor's capabilities.
        step_tokens: most tokens of a request in one step.
        evicted: called with a group's number and a block that requests must not find any more.

    Attributes:
        groups: the cache groups by name.
        pools: cache group -> its blocks.
        kinds: cache group -> its kind of cache.
        changes: a count that grows when there may be more free blocks, or longer prefixes to find, than before.
        copies: cache group -> (source, destination) of the copies that the next step makes. Both blocks are pinned.
        clears: cache group -> blocks that the next step sets to zero, as their numbers may not be finite.

    Raises:
        ValueError: the blocks of a group don't make whole splits for each of several owners.
        BundleError: no kind of cache takes a group.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        blocks: Mapping[str, int],
        caps: ExecutorCaps,
        step_tokens: int,
        evicted: Callable[[int, int], None],
    ) -> None:
        self.groups = {g.name: g for g in groups}
        self.pools: dict[str, BlockPool] = {}
        self.kinds: dict[str, CacheKind] = {}
        for i, g in enumerate(groups):
            pool = pool_of(g.name, g.block_size, blocks[g.name], caps.owners, partial(evicted, i))
            self.pools[g.name] = pool
            self.kinds[g.name] = kind_of(g, caps)(g, pool, self, step_tokens)
        self.changes = 0
        self.copies: dict[str, list[tuple[int, int]]] = {}
        self.clears: dict[str, list[int]] = {}
        self._handed: dict[int, Pins] = {}  # a step's id -> the blocks of ``hand_over``, until it has run
        self._clearing: dict[int, dict[str, list[int]]] = {}  # a step's id -> the blocks that it clears, until then
        # Blocks that may hold numbers that aren't finite: they are cleared before they are anybody's again.
        self._doubtful: dict[str, set[int]] = {g.name: set() for g in groups}
        self._unverified: set[Request] = set()  # whose computed tokens no finite row follows yet
        self._clears_blocks = caps.shared_blocks

    def room(self, tokens: int, sequences: int = 1) -> int:
        """Returns the number of tokens, at most ``tokens``, that all groups can hold for each of ``sequences`` at a
        time.

        It is safe from any thread.
        """
        return min([tokens, *(kind.room(tokens, sequences) for kind in self.kinds.values())])

    def lacking(self, request: Request, tokens: int) -> dict[str, int]:
        """Returns cache group -> number of blocks that ``request`` still lacks to hold ``tokens`` tokens."""
        return {name: kind.lacking(request, tokens) for name, kind in self.kinds.items()}

    def fixed_blocks(self, sequences: int) -> dict[str, int]:
        """Returns cache group -> number of blocks that ``sequences`` requests take, if it doesn't depend on their
        tokens; otherwise 0.
        """
        return {name: sequences * kind.blocks_for(1) if kind.fixed else 0 for name, kind in self.kinds.items()}

    def has_blocks_for(self, candidate: Candidate, sources: Sequence[int] = ()) -> bool:
        """Returns True if there are blocks for all tokens of a request, besides those that are promised to others.

        Args:
            candidate: the request, which may hold some blocks.
            sources: for each group, the block that the request's next block will be a copy of; NO_BLOCK for no copy.
        """
        request, force = candidate.request, candidate.force
        for i, (name, kind) in enumerate(self.kinds.items()):
            pool, count = self.pools[name], kind.lacking(request, len(request.tokens))
            if candidate.promised.get(name, 0) + count > pool.available(request.tenant, force=force):
                return False
            owner = pool.owner_of(sources[i]) if sources and sources[i] != NO_BLOCK else None
            table = request.tables.get(name, ())
            if len(pool.owners_of_next(table, count, request.tenant, force=force, owner=owner)) < count:
                return False
        return True

    def grow(self, request: Request, tokens: int, *, force: bool = False) -> bool:
        """Takes blocks until ``request`` can hold ``tokens``; takes none and returns False if there are too few.

        ``force``: True if all of another tenant's blocks may be evicted.
        """
        if tokens <= request.capacity:
            return True
        owners: dict[str, list[int]] = {}
        for name, kind in self.kinds.items():
            table = request.tables.get(name, ())
            count = max(kind.blocks_for(tokens) - len(table), 0)
            owners[name] = self.pools[name].owners_of_next(table, count, request.tenant, force=force)
            if len(owners[name]) < count:
                return False
        for name, each in owners.items():
            pool = self.pools[name]
            request.tables.extend(name, (self.cleared(name, pool.allocate(request.tenant, owner)) for owner in each))
        self.set_capacity(request, tokens)
        return True

    def set_capacity(self, request: Request, without_groups: int) -> None:
        """Sets ``request.capacity`` to the tokens that its tables have room for.

        ``without_groups``: the capacity if there are no cache groups.
        """
        tables = request.tables
        request.capacity = min(
            (kind.tokens_in(len(tables.get(name, ()))) for name, kind in self.kinds.items()), default=without_groups
        )

    def fitting(self, request: Request, count: int, *, force: bool = False) -> int:
        """Returns how many of a request's next ``count`` tokens fit into its blocks and the available ones.

        ``force``: True if all of another tenant's blocks may be evicted.
        """
        for name, kind in self.kinds.items():
            table = request.tables.get(name, ())
            more = max(kind.blocks_for(request.computed + count) - len(table), 0)
            owners = self.pools[name].owners_of_next(table, more, request.tenant, force=force)
            count = min(count, kind.tokens_in(len(table) + len(owners)) - request.computed)
        return count

    def allocate(self, request: Request, name: str, like: int = NO_BLOCK) -> int:
        """Takes one more block of a group for a request, and returns its number. Raises CapacityError if none is free.

        Args:
            request: the request.
            name: the cache group.
            like: a block; the new one has the same owner (a rank). NO_BLOCK lets the pool choose the owner.
        """
        pool, table = self.pools[name], request.tables.get(name, ())
        if like != NO_BLOCK:
            owners = [pool.owner_of(like)]
        else:
            owners = pool.owners_of_next(table, 1, request.tenant, force=True) or list(map(pool.owner_of, table[-1:]))
        return self.cleared(name, pool.allocate(request.tenant, *owners))

    def cleared(self, name: str, block: int) -> int:
        """Returns ``block``, and has the next step clear it if it may have numbers that aren't finite."""
        if block in self._doubtful[name]:
            self._doubtful[name].remove(block)
            if block not in (pending := self.clears.setdefault(name, [])):
                pending.append(block)
        return block

    def not_cleared(self, name: str, block: int) -> None:
        """Cancels the clearing of a block that was overwritten in the meantime. ``name`` is its cache group."""
        if block in self.clears.get(name, ()):
            self.clears[name].remove(block)

    def copy_block(self, request: Request, name: str, source: int) -> None:
        """Makes the request's next block of a group a copy of ``source``.

        The next step makes the copy, before it writes anything else. Until then both blocks are pinned: otherwise a
        read from a disk could overwrite one, or another request could get it.
        """
        request.tables.extend(name, [block := self.allocate(request, name, source)])
        self.pools[name].pin(source)
        self.pools[name].pin(block)
        self.copies.setdefault(name, []).append((source, block))

    def give_back(self, request: Request, name: str, at: int) -> None:
        """Releases block ``at`` of a request's table of group ``name``, and puts NO_BLOCK in its place."""
        block = request.tables[name][at]
        if request in self._unverified:
            self._doubtful[name].add(block)
        self.pools[name].release(block)
        request.tables.drop(name, at)
        self.changes += 1

    def cut(self, request: Request, lengths: Mapping[str, int]) -> None:
        """Shortens the tables of a request, and releases the removed blocks.

        ``lengths``: cache group -> blocks that stay.
        """
        for name, length in lengths.items():
            for block in reversed(request.tables[name][length:]):
                if block != NO_BLOCK:
                    self.pools[name].release(block)
            request.tables.cut(name, length)

    def take_all(self, request: Request) -> None:
        """Releases all blocks of a request, and cancels copies to blocks that it alone holds."""
        if self.copies:
            self._cancel_copies(request)
        for name, table in request.tables.items():
            if request in self._unverified:
                self._doubtful[name].update(block for block in table if block != NO_BLOCK)
            for block in reversed(table):  # the last one first: it is of no use without those before it
                if block != NO_BLOCK:
                    self.pools[name].release(block)
        request.tables.replace({})
        request.capacity = request.computed = 0

    def _cancel_copies(self, request: Request) -> None:
        """Cancels pending copies to blocks that only this request holds, which is about to release them."""
        for name, table in request.tables.items():
            pool, pairs = self.pools[name], self.copies.get(name, [])
            for pair in [pair for pair in pairs if pair[1] in table and pool.requests(pair[1]) == 1]:
                pairs.remove(pair)
                self.unpin((name, block) for block in pair)

    def doubt(self, request: Request) -> None:
        """Notes that the keys of a request's last tokens may not be finite.

        Its blocks are then cleared before their next use.
        """
        if self._clears_blocks:
            self._unverified.add(request)

    def trust(self, request: Request) -> None:
        """Notes that the keys of a request's tokens are finite."""
        self._unverified.discard(request)

    def is_doubted(self, request: Request) -> bool:
        """Returns True if a request's last computed tokens may have keys that aren't finite."""
        return request in self._unverified

    def doubted(self, blocks: Pins) -> bool:
        """Returns True if one of these blocks may have keys that aren't finite."""
        return any(
            block in self._doubtful[name] or any(block in request.tables.get(name, ()) for request in self._unverified)
            for name, block in blocks
        )

    # The next step

    def hand_over(self, step: StepInput) -> None:
        """Gives a step the blocks to clear and to copy before it runs. They stay pinned until ``landed``."""
        self._check_writes(step)
        if not self.copies and not self.clears:
            return
        copies, self.copies = self.copies, {}
        clears = self._due_clears(copies)
        copied = _ends(copies)
        assert all(self.pools[name].holders(block) for name, block in copied), "a copy holds both of its blocks"
        cleared = [(name, block) for name, blocks in clears.items() for block in blocks]
        for name, block in cleared:
            self.pools[name].pin(block)
        step.copies = {name: np.array(pairs, np.int32) for name, pairs in copies.items() if pairs}
        step.clears = {name: np.array(blocks, np.int32) for name, blocks in clears.items() if blocks}
        self._handed[id(step)] = [*copied, *cleared]
        if clears:
            self._clearing[id(step)] = clears

    def _due_clears(self, copies: Copies) -> dict[str, list[int]]:
        """Returns the blocks of each group that a step with ``copies`` clears.

        A step clears before it copies, so blocks that the copies read are left to the next step, unless other copies of
        the step have overwritten them.
        """
        due: dict[str, list[int]] = {}
        pending, self.clears = self.clears, {}
        for name, blocks in pending.items():
            read = {source for source, _ in copies.get(name, ())}
            due[name] = [block for block in blocks if block not in read]
            written = {to for _, to in copies.get(name, ())}
            if left := [block for block in blocks if block in read and block not in written]:
                self.clears[name] = left
        return due

    def _check_writes(self, step: StepInput) -> None:
        """Asserts that exactly one request holds each block that a step writes, so that no other request's keys
        change.
        """
        for name, pool in self.pools.items():
            requests, total = pool.requests, pool.total_blocks
            for block in set((step.arrays[group_port(SLOTS, name)] // self.groups[name].block_size).tolist()):
                assert not 0 <= block < total or requests(block) == 1, f"block {block} of {name} isn't one request's"

    def ran(self, step: StepInput) -> None:
        """Notes that a step has run, and so has cleared its blocks."""
        if self._clearing:
            self._clearing.pop(id(step), None)

    def never_ran(self, step: StepInput) -> None:
        """Notes that a step didn't run to its end: a later step clears its blocks."""
        self._doubt_blocks(self._clearing.pop(id(step), {}))

    def landed(self, step: StepInput) -> None:
        """Unpins the blocks that ``hand_over`` gave to a step, after it has run or failed."""
        if self._handed:
            self.unpin(self._handed.pop(id(step), ()))

    def drop_copies(self) -> None:
        """Cancels the pending copies, and unpins the blocks of all steps: none of them will run."""
        copies, self.copies = self.copies, {}
        self.unpin(_ends(copies))
        handed, self._handed = self._handed, {}
        for pins in handed.values():
            self.unpin(pins)
        clearing, self._clearing = self._clearing, {}
        for clears in clearing.values():
            self._doubt_blocks(clears)

    def unpin(self, pins: Iterable[tuple[str, int]]) -> None:
        """Removes one pin from each of these blocks."""
        for name, block in pins:
            self.pools[name].unpin(block)
            self.changes += 1

    def _doubt_blocks(self, blocks: Mapping[str, Sequence[int]]) -> None:
        for name, of_group in blocks.items():
            self._doubtful[name].update(of_group)


def _ends(copies: Copies) -> list[tuple[str, int]]:
    """Returns (cache group, block) for the source and the destination of each copy."""
    return [(name, block) for name, pairs in copies.items() for pair in pairs for block in pair]
