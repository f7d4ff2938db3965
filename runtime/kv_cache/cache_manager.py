"""Which KV blocks each request holds: taken as its tokens come, found where others have its beginning, given back.

A request begins with the blocks of the longest prefix that is known, to the token: whole blocks are shared, and one
that is used in part is copied, so that nobody writes to what another reads. What a request has computed can be found
as soon as the step is over, and stays so after its end, until the memory is needed for something else.

Layers with a sliding window need only the last blocks: those before are given back, and a table has holes (NO_BLOCK)
there. A prefix is of use only where the window before its end is there, too.

Where several ranks divide the keys, each of them owns some blocks, and all blocks of a split of ``SPLIT_TOKENS`` are of
one owner: of the one with most to give, where a request begins a split. A window's blocks are given back split by
split. So a request that runs alone can always have the rest of a split that it has begun: its other splits are whole,
and an owner's blocks make whole splits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from enginewright.runtime.requests.block_tables import NO_BLOCK
from enginewright.runtime.requests.request import Request

from ..shared.contracts import CacheGroup, StepInput
from .block_pool import BlockPool, DividedPool
from .disk_tier import DiskTier
from .kept_slots import KeptSlots
from .pool_plan import SPLIT_TOKENS, window_tokens
from .prefix_index import Match, Namespace, Node, PrefixIndex

Pins = Sequence[tuple[str, int]]
"""Blocks that are pinned: cache group and block."""

LEAST_COPIED = 4
"""Fewer tokens of a block are computed rather than copied: a copy moves the whole block."""


@dataclass
class PrefixUse:
    """What the prefix cache did so far.

    Attributes:
        requests, hits: that began (after a preemption, too) and might have found a prefix, and those that did.
        tokens, reused: that they had, and that they found.
        copied_blocks: of prefixes that end within a block, over all groups.
        from_disk: tokens of ``reused`` that were read from a disk.
    """

    requests: int = 0
    hits: int = 0
    tokens: int = 0
    reused: int = 0
    copied_blocks: int = 0
    from_disk: int = 0


@dataclass(slots=True)
class _Place:
    """Where in the index a request is.

    Attributes:
        node, blocks: of its last full block that can be found, or the root; so many blocks lie up to there.
        ran: whether a step of it is over; before that, a block that is to be copied has nothing in it.
    """

    node: Node
    blocks: int
    ran: bool = False


class CacheManager:
    """See the module. Knows numbers of blocks; their memory is the executor's.

    Args:
        groups, blocks: cache groups of the program, and how many blocks each has.
        step_tokens: most tokens of a request in one step.
        shared_blocks: whether the executor takes blocks of several holders, and tables with holes. Without it nothing
            is given back before a request's end.
        kept_slots: whether a block is the slot of a whole request; see ``KeptSlots``.
        prefix_cache: whether requests find what others have computed, if the executor has slots, or takes shared
            blocks and the groups' blocks have one size.
        owners: see the module; the blocks of each group make whole splits for each of so many.
        guard: wraps the disk tier, so that it never raises.

    Raises ValueError if they don't.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        blocks: Mapping[str, int],
        *,
        step_tokens: int,
        shared_blocks: bool,
        kept_slots: bool = False,
        prefix_cache: bool,
        owners: int = 1,
        guard: Callable[[DiskTier], DiskTier] = lambda disk: disk,
    ) -> None:
        self.groups = {g.name: g for g in groups}
        self.owners = owners
        self._units = {g.name: g.block_size if owners == 1 else SPLIT_TOKENS for g in groups}
        self.index: PrefixIndex | None = None
        if prefix_cache and shared_blocks and len({g.block_size for g in groups}) == 1:
            self.index = PrefixIndex(groups[0].block_size, [g.window > 0 for g in groups], self._drop)
        self.pools: dict[str, BlockPool] = {}
        for i, group in enumerate(groups):
            self.pools[group.name] = self._pool(group, blocks[group.name], partial(self._evicted, i))
        self._slots = KeptSlots(self.pools) if prefix_cache and kept_slots else None
        self.use = PrefixUse()
        self._guard = guard
        self._disk: DiskTier | None = None
        self.changes = 0  # grows when there may be more blocks, or more to find, than before
        self.copies: dict[str, list[tuple[int, int]]] = {}  # group -> (from, to), both pinned; for the next step
        self.clears: dict[str, list[int]] = {}  # group -> blocks of requests whose numbers were not finite; as well
        self._handed: dict[int, Pins] = {}  # a step's id -> what it got by ``hand_over``, until it has run
        self._clearing: dict[int, dict[str, list[int]]] = {}  # a step's id -> what it clears, until it has run
        # Blocks that may hold numbers that aren't finite: they are cleared before they are anybody's again.
        self._doubtful: dict[str, set[int]] = {g.name: set() for g in groups}
        self._unverified: set[Request] = set()  # whose computed tokens no finite row follows yet
        self.windows = tuple(g.name for g in groups if g.window and shared_blocks)
        self._step_tokens = step_tokens
        self._shared_blocks = shared_blocks
        self._places: dict[Request, _Place] = {}

    @property
    def disk(self) -> DiskTier | None:
        """The tier to which evicted blocks go, and in which they are found again; None for none."""
        return self._disk

    @disk.setter
    def disk(self, disk: DiskTier | None) -> None:
        self._disk = None if disk is None else self._guard(disk)

    def most_held(self, group: CacheGroup, tokens: int) -> int:
        """Most tokens that a request of so many tokens ever holds blocks for in a group."""
        unit = self._units[group.name]
        return min(tokens, window_tokens(group, 1, self._step_tokens, unit)) if group.name in self.windows else tokens

    def room(self, group: CacheGroup, tokens: int, sequences: int) -> int:
        """So many tokens, or what a group can hold of each of so many sequences at a time, if that is fewer."""
        blocks, size, unit = self.pools[group.name].total_blocks, group.block_size, self._units[group.name]
        whole = unit
        if self.owners > 1 and sequences > 1:  # all sequences of a search may have their blocks of one owner
            blocks, whole = blocks // self.owners, size
        if group.name in self.windows and window_tokens(group, sequences, self._step_tokens, unit) <= blocks * size:
            return tokens
        return min(tokens, blocks * size // whole // sequences * whole)

    def begin(
        self,
        request: Request,
        others: Iterable[Request],
        promised: Mapping[str, int],
        *,
        force: bool,
        disk: DiskTier | None = None,
    ) -> bool:
        """Has a request begin with what is known of its tokens: sets its tables and ``computed``.

        Args:
            request: one without blocks.
            others: requests that run. If one is about to compute this one's next block, that is waited for.
            promised: cache group -> blocks that others will take. There must be enough left for its tokens so far.
            force: whether all of another tenant's blocks may be evicted.
            disk: what is read in place of the engine's own tier. Nothing is written to it.

        Returns:
            False, and it has no blocks, if it has to wait.
        """
        if (index := self.index) is None:
            fits = self._has_blocks_for(request, promised, force)
            if fits and self._slots is not None:
                if not request.wants_prompt and self._slots.take(request):
                    request.capacity = min(group.block_size for group in self.groups.values())
                self._count(request)
            return fits
        size, match = index.block_size, Match((), 0)
        if not request.wants_prompt:  # whose every row is computed
            match = index.find(request.namespace, request.tokens, len(request.tokens) - 1)
        tokens = index.usable(match, self._first_blocks, LEAST_COPIED)
        end = tokens // size * size + size
        if not request.wants_prompt and any(_is_ahead(other, request, end) for other in others):
            return False
        whole, part = divmod(tokens, size)
        sources = self._begin_with(request, match, tokens)
        if part and (self._doubted(sources) or not self._has_blocks_for(request, promised, force, sources)):
            # A copy has the rest of its source too, and holds it: where it may not, the part's tokens are computed.
            self._undo_begin(request, sources)
            whole, part = divmod(index.usable(match, self._first_blocks, size), size)
            sources = self._begin_with(request, match, whole * size)
        if not part and not self._has_blocks_for(request, promised, force):
            self._undo_begin(request, sources)
            return False
        request.capacity = whole * size if self.groups else 0
        node = match.nodes[whole - 1] if whole else index.root(request.namespace)
        node.users += 1
        self._places[request] = place = _Place(node, whole)
        try:
            if not self._read(index, request, place, self.disk if disk is None else disk) and part:
                self._copy(request, sources)
        finally:
            self._unpin(zip(self.pools, sources, strict=False))
        self._count(request)
        return True

    def _begin_with(self, request: Request, match: Match, tokens: int) -> Sequence[int]:
        """Shares the blocks of a match's first ``tokens`` with a request, and pins those that it has a part of.

        Returns the latter, one a group; none where ``tokens`` are whole blocks.
        """
        assert self.index is not None
        whole, part = divmod(tokens, self.index.block_size)
        for i, (name, group) in enumerate(self.groups.items()):
            first = min(self.first_block(group, tokens), whole)
            request.tables.put(name, [NO_BLOCK] * first)
            for node in match.nodes[first:whole]:
                self.pools[name].share(node.blocks[i])
                request.tables.extend(name, [node.blocks[i]])
        request.computed = tokens
        sources = tuple(match.nodes[whole].blocks) if part else ()
        for name, source in zip(self.pools, sources, strict=False):
            self.pools[name].pin(source)
        return sources

    def _doubted(self, blocks: Sequence[int]) -> bool:
        """Returns True if one of these blocks, one a group, may have keys that aren't finite."""
        return any(
            block in self._doubtful[name] or any(block in request.tables.get(name, ()) for request in self._unverified)
            for name, block in zip(self.groups, blocks, strict=True)
        )

    def _undo_begin(self, request: Request, sources: Sequence[int]) -> None:
        self._unpin(zip(self.pools, sources, strict=False))
        self._take_all(request)

    def fork(self, source: Request, request: Request) -> bool:
        """``request``, which has no blocks, begins with all that ``source`` has computed, of the same tokens.

        Full blocks are shared; the one that the next token goes to is copied, so that each writes to its own. Returns
        False, and it has no blocks, if there is none for that.
        """
        parts = {name: source.computed % group.block_size for name, group in self.groups.items()}
        for name, part in parts.items():
            at = source.computed // self.groups[name].block_size
            if part and not self._part(name, source.tables[name][at]).available(request.tenant):
                return False
        for name, group in self.groups.items():
            whole = source.computed // group.block_size
            for block in (table := source.tables[name][:whole]):
                if block != NO_BLOCK:
                    self.pools[name].share(block)
            request.tables.put(name, table)
            if parts[name]:
                self._copy_block(request, name, source.tables[name][whole])
        request.computed = source.computed
        request.capacity = min(len(request.tables[name]) * g.block_size for name, g in self.groups.items())
        if (place := self._places.get(source)) is not None:
            place.node.users += 1
            self._places[request] = _Place(place.node, place.blocks)
        return True

    def lacking(self, request: Request, tokens: int) -> dict[str, int]:
        """Cache group -> blocks that ``request`` will have to take, at once or bit by bit, to hold ``tokens``."""
        lacking = {}
        for name, group in self.groups.items():
            table = request.tables.get(name, ())
            lacking[name] = -(-tokens // group.block_size) - len(table)
            if name in self.windows:
                held = len(table) - self.first_block(group, request.computed)
                most = -(-self.most_held(group, tokens) // group.block_size)
                lacking[name] = min(lacking[name], most - held)
            lacking[name] = max(lacking[name], 0)
        return lacking

    def grow(self, request: Request, tokens: int, *, force: bool = False) -> bool:
        """Takes blocks until ``request`` can hold ``tokens``; takes none and returns False if they don't suffice."""
        if tokens <= request.capacity:
            return True
        lengths = {name: len(request.tables.get(name, ())) for name in self.groups}
        needed = {name: -(-tokens // group.block_size) - lengths[name] for name, group in self.groups.items()}
        if any(n > 0 and n > self.pools[name].available(request.tenant, force=force) for name, n in needed.items()):
            return False
        if self.owners > 1:
            return self._grow_in_splits(request, needed, force)
        for name, count in needed.items():
            pool = self.pools[name]
            request.tables.extend(name, (self._cleared(name, pool.allocate(request.tenant)) for _ in range(count)))
        request.capacity = min(
            (len(request.tables[name]) * group.block_size for name, group in self.groups.items()), default=tokens
        )
        return True

    def fitting(self, request: Request, count: int, *, force: bool = False) -> int:
        """How many of the next ``count`` tokens fit into the blocks that it has and those that are available."""
        for name, group in self.groups.items():
            available = self.pools[name].available(request.tenant, force=force)
            if self.owners > 1:
                wanted = -(-(request.computed + count) // group.block_size) - len(request.tables.get(name, ()))
                available = len(self._owners_of_next(request, name, max(wanted, 0), force))
            blocks = len(request.tables.get(name, ())) + available
            count = min(count, blocks * group.block_size - request.computed)
        return count

    def after_step(self, request: Request, *, finite: bool = True) -> None:
        """After a step of a request: blocks that got full can be found, and those before a window are given back.

        ``finite``: whether the step gave a row of its last token, which is finite. Then so is all that it depends on.
        """
        if finite:
            self._unverified.discard(request)
        else:
            self.doubt(request)
        if self.index is not None:
            self._add_full_blocks(self.index, request)
        for name in self.windows:
            self._give_back(request, name)

    def doubt(self, request: Request) -> None:
        """Notes that a request's last tokens may have keys that aren't finite: what it releases is cleared."""
        if self._shared_blocks:
            self._unverified.add(request)

    def release(self, request: Request, *, partly: bool = True) -> None:
        """Takes all blocks of a request. What it computed can be found as long as nobody needs the memory; without
        ``partly`` no more than its full blocks."""
        place = self._places.pop(request, None)
        if place is not None:
            assert self.index is not None
            size = self.index.block_size
            whole, part = divmod(request.computed, size)
            # What lies in the last block can be found, too, unless the request failed.
            if (
                partly
                and part
                and place.ran
                and whole == place.blocks
                and request.error is None
                and not place.node.detached
            ):
                self._add(self.index, request, place.node, whole, part)
            place.node.users -= 1
            self.index.prune(place.node)
        if self._slots is not None:
            self._slots.keep(request)
        if request.error is not None and self._shared_blocks:
            self._clear(request)
            self._unverified.discard(request)
        self._take_all(request)
        self._unverified.discard(request)
        self.changes += 1

    def statistics(self, running: Sequence[Request]) -> dict[str, Any] | None:
        """What the prefix cache did so far, and what blocks are for, of each group; None without a prefix cache.

        ``unused_tokens`` is the waste: places in held blocks that no token of their requests has come to yet.
        """
        if self.index is None and self._slots is None:
            return None
        blocks = {}
        for name, pool in self.pools.items():
            size, kept = self.groups[name].block_size, pool.kept_blocks
            unused = sum(max(len(r.tables.get(name, ())) * size - r.computed, 0) for r in tuple(running))
            blocks[name] = {"held": pool.total_blocks - pool.free_blocks, "shared": pool.shared_blocks, "kept": kept}
            blocks[name] |= {"free": pool.free_blocks - kept, "evictions": pool.evictions, "unused_tokens": unused}
        return asdict(self.use) | {"blocks": blocks, "disk": self.disk and self.disk.describe()}

    def first_block(self, group: CacheGroup, position: int) -> int:
        """The first block of a group that a query at ``position``, or a later one, sees; or those before it that are
        given back together with it."""
        if not group.window:
            return 0
        unit = self._units[group.name]
        return max(position - group.window + 1, 0) // unit * (unit // group.block_size)

    def _has_blocks_for(
        self, request: Request, promised: Mapping[str, int], force: bool, sources: Sequence[int] = ()
    ) -> bool:
        """Returns True if there are blocks for all its tokens; the next one of each group is a copy of ``sources``."""
        needed = self.lacking(request, len(request.tokens))
        return all(
            promised[name] + needed[name] <= pool.available(request.tenant, force=force)
            and (self.owners == 1 or self._has_splits_for(request, name, needed[name], force, sources[i : i + 1]))
            for i, (name, pool) in enumerate(self.pools.items())
        )

    def _has_splits_for(self, request: Request, name: str, count: int, force: bool, source: Sequence[int]) -> bool:
        """Returns True if owners have the next blocks of a request, the first of which is a copy of ``source``."""
        first = source[0] % self.owners if source else None
        return len(self._owners_of_next(request, name, count, force, first)) == count

    # Where the keys have several owners

    def _pool(self, group: CacheGroup, blocks: int, evicted: Callable[[int], None]) -> BlockPool:
        if self.owners == 1:
            return BlockPool(blocks, evicted)
        size = SPLIT_TOKENS // group.block_size * self.owners
        if SPLIT_TOKENS % group.block_size or blocks % size:
            raise ValueError(f"blocks: {blocks} of {group.name} aren't whole splits of {self.owners} owners")
        return DividedPool(blocks, self.owners, evicted)

    def _part(self, name: str, block: int) -> BlockPool:
        """The pool that a block is of."""
        pool = self.pools[name]
        return pool.parts[block % self.owners] if isinstance(pool, DividedPool) else pool

    def _owners_of_next(
        self, request: Request, name: str, count: int, force: bool, owner: int | None = None
    ) -> list[int]:
        """Whose the next ``count`` blocks of a request are, or as many of them as there are.

        A split that has been begun keeps its owner. Another one is of who has most, and of several that have, of the
        one next to the last split's owner. So an empty pool gives 0 1 2 2 1 0 0 1 2: then all have as much to do for a
        prompt, whose later tokens see more splits. ``owner``: of the next block, if that is known.
        """
        pool, table = self.pools[name], list(request.tables.get(name, ()))
        assert isinstance(pool, DividedPool)
        left, owners, at = pool.available_of(request.tenant, force=force), list[int](), len(table)
        each = SPLIT_TOKENS // self.groups[name].block_size
        last = table[-1] % self.owners if at and table[-1] != NO_BLOCK else 0
        if owner is None and at % each and table[-1] != NO_BLOCK:
            owner = last
        while len(owners) < count:
            if owner is None:
                most = max(left)
                owner = min((abs(last - i), i) for i, n in enumerate(left) if n == most)[1]
            wanted = min(count - len(owners), each - at % each)
            taken = min(wanted, left[owner])
            owners += [owner] * taken
            if taken < wanted:
                break
            left[owner] -= taken
            at += taken
            last, owner = owner, None
        return owners

    def _grow_in_splits(self, request: Request, needed: Mapping[str, int], force: bool) -> bool:
        """Takes ``needed`` blocks of each group; takes none and returns False if their owners don't have them."""
        owners = {name: self._owners_of_next(request, name, max(n, 0), force) for name, n in needed.items()}
        if any(len(owners[name]) < n for name, n in needed.items()):
            return False
        for name, of in owners.items():
            pool = self.pools[name]
            assert isinstance(pool, DividedPool)
            request.tables.extend(name, (self._cleared(name, pool.allocate(request.tenant, owner)) for owner in of))
        request.capacity = min(len(request.tables[name]) * group.block_size for name, group in self.groups.items())
        return True

    def _allocate(self, request: Request, name: str, like: int | None = None) -> int:
        """One more block of a group for a request: of the owner of block ``like``, or of who is next."""
        pool = self.pools[name]
        if not isinstance(pool, DividedPool):
            return self._cleared(name, pool.allocate(request.tenant))
        if like is not None:
            return self._cleared(name, pool.allocate(request.tenant, like % self.owners))
        owners = self._owners_of_next(request, name, 1, force=True) or [request.tables[name][-1] % self.owners]
        return self._cleared(name, pool.allocate(request.tenant, owners[0]))

    def _cleared(self, name: str, block: int) -> int:
        """Has the next step clear a block that was just taken, if what it holds may not be finite."""
        if block in self._doubtful[name]:
            self._doubtful[name].remove(block)
            if block not in (pending := self.clears.setdefault(name, [])):
                pending.append(block)
        return block

    def _joined(self, parent: Node, at: int, tokens: tuple[int, ...], blocks: Sequence[int]) -> list[int]:
        """Which of these blocks may be those of the node of ``tokens`` behind ``parent``.

        Block ``at`` of a request must have the owner of its neighbours in a split.
        """
        each = [SPLIT_TOKENS // group.block_size for group in self.groups.values()]
        place = bisect_left(parent.children, tokens, key=lambda child: child.tokens)
        node = parent.children[place] if place < len(parent.children) else None
        if node is not None and node.tokens != tokens:
            node = None
        joined = list(blocks)
        for i, block in enumerate(blocks):
            near = [parent.blocks[i]] if at % each[i] else []
            if node is not None and (at + 1) % each[i]:
                near += [child.blocks[i] for child in node.children]
            others = {other % self.owners for other in near if other != NO_BLOCK}
            if block != NO_BLOCK and others - {block % self.owners}:
                joined[i] = NO_BLOCK
        return joined

    def _copy(self, request: Request, sources: Sequence[int]) -> None:
        """Has a request go on in copies of the blocks in which its prefix ends, one a group."""
        for source, name in zip(sources, self.pools, strict=True):
            self._copy_block(request, name, source)
            request.capacity = len(request.tables[name]) * self.groups[name].block_size
            self.use.copied_blocks += 1

    def _copy_block(self, request: Request, name: str, source: int) -> None:
        """Makes the request's next block of a group a copy of ``source``.

        The copy is made by the next step, before anything else is written. Until then both blocks are pinned: what is
        read from a disk is written at once, and a block that is free is given to somebody else.
        """
        request.tables.extend(name, [block := self._allocate(request, name, source)])
        self.pools[name].pin(source)
        self.pools[name].pin(block)
        self.copies.setdefault(name, []).append((source, block))

    def hand_over(self, step: StepInput) -> None:
        """Gives a step the blocks to clear and to copy before it runs. They stay pinned until it has: ``landed``."""
        self._check_writes(step)
        if not self.copies and not self.clears:
            return
        copies, self.copies = self.copies, {}
        clears, self.clears = self.clears, {}
        for name, pairs in copies.items():
            holders = self.pools[name].holders
            assert all(holders(source) and holders(to) for source, to in pairs), "a copy holds both of its blocks"
        for name, pairs in copies.items():  # a step clears before it copies: what is still read is cleared by the next
            read = {source for source, _ in pairs}
            if late := [block for block in clears.get(name, ()) if block in read]:
                self.clears[name] = late
                clears[name] = [block for block in clears[name] if block not in read]
        for name, blocks in clears.items():
            for block in blocks:
                self.pools[name].pin(block)
        step.copies = {name: np.array(pairs, np.int32) for name, pairs in copies.items() if pairs}
        step.clears = {name: np.array(blocks, np.int32) for name, blocks in clears.items() if blocks}
        copied = [(name, block) for name, pairs in copies.items() for pair in pairs for block in pair]
        self._handed[id(step)] = [*copied, *((name, block) for name, blocks in clears.items() for block in blocks)]
        if clears:
            self._clearing[id(step)] = clears

    def _check_writes(self, step: StepInput) -> None:
        """Asserts that one request holds each block that a step writes: else another one would get wrong tokens."""
        for name, pool in self.pools.items():
            holders, pins, total = pool.holders, pool.pins, pool.total_blocks
            for block in set((step.slots[name] // self.groups[name].block_size).tolist()):
                assert block >= total or holders(block) - pins(block) == 1, (
                    f"block {block} of {name} isn't one request's"
                )

    def ran(self, step: StepInput) -> None:
        """A step has run: the blocks that it was to clear are clear."""
        if self._clearing:
            self._clearing.pop(id(step), None)

    def never_ran(self, step: StepInput) -> None:
        """A step never ran, or not to its end: the blocks that it was to clear are cleared before anybody has them."""
        self._doubt_blocks(self._clearing.pop(id(step), {}))

    def landed(self, step: StepInput) -> None:
        """A step has run, or never will: what it got by ``hand_over`` is free for others."""
        if self._handed:
            self._unpin(self._handed.pop(id(step), ()))

    def drop_copies(self) -> None:
        """Makes no copy that is pending, and frees what all steps had: none of them will run."""
        copies, self.copies = self.copies, {}
        self._unpin((name, block) for name, pairs in copies.items() for pair in pairs for block in pair)
        handed, self._handed = self._handed, {}
        for pins in handed.values():
            self._unpin(pins)
        clearing, self._clearing = self._clearing, {}
        for clears in clearing.values():
            self._doubt_blocks(clears)

    def _doubt_blocks(self, blocks: Mapping[str, Sequence[int]]) -> None:
        for name, of_group in blocks.items():
            self._doubtful[name].update(of_group)

    def _unpin(self, pins: Iterable[tuple[str, int]]) -> None:
        for name, block in pins:
            self.pools[name].unpin(block)
            self.changes += 1

    def _read(self, index: PrefixIndex, request: Request, place: _Place, disk: DiskTier | None) -> bool:
        """What the next blocks hold comes from the disk, as far as it can be believed; whether that is any.

        The last token is computed. Where a group has a window, it is all or nothing: a part might lack the window's.
        """
        if disk is None or request.wants_prompt:
            return False
        size, first = index.block_size, place.blocks
        names = disk.find(place.node, request.tokens[first * size : len(request.tokens) - 1], size)
        end = (first + len(names)) * size
        for at, name in enumerate(names, first):
            for group, table in request.tables.items():
                seen = at >= self.first_block(self.groups[group], end)
                request.tables.extend(group, [self._allocate(request, group) if seen else NO_BLOCK])
                self._not_cleared(group, table[-1])
            blocks = [table[at] for table in request.tables.values()]
            if not disk.read(name, request.tokens[at * size : (at + 1) * size], blocks):
                self._cut(request, first if self.windows else at)
                break
        done = min(map(len, request.tables.values())) - first
        if not done:
            return False
        node = place.node
        for at in range(first, first + done):
            node = self._add(index, request, node, at, size)
        node.users += 1
        place.node.users -= 1
        place.node, place.blocks = node, first + done
        disk.used(names[:done])
        request.computed = request.capacity = place.blocks * size
        self.use.from_disk += done * size
        for group in self.windows:
            self._give_back(request, group, since=first)
        return True

    def _cut(self, request: Request, length: int) -> None:
        """Takes the blocks behind a place of the tables away."""
        for name, table in request.tables.items():
            for block in reversed(table[length:]):
                if block != NO_BLOCK:
                    self.pools[name].release(block)
            request.tables.cut(name, length)

    def _count(self, request: Request) -> None:
        if not request.wants_prompt:
            self.use.requests += 1
            self.use.hits += request.computed > 0
            self.use.tokens += len(request.tokens)
            self.use.reused += request.computed
        if request.cached_tokens is None:
            request.cached_tokens = request.computed

    def _add_full_blocks(self, index: PrefixIndex, request: Request) -> None:
        place = self._places[request]
        place.ran = True
        if place.blocks == request.computed // index.block_size:
            return
        node, at = place.node, place.blocks
        if node.detached:  # a prefix of the same tokens, which it didn't hold, is lost: its own takes the place
            node, at = index.root(request.namespace), 0
        while (at + 1) * index.block_size <= request.computed:
            node = self._add(index, request, node, at, index.block_size)
            at += 1
        node.users += 1
        place.node.users -= 1
        index.prune(place.node)
        place.node, place.blocks = node, at
        self.changes += 1

    def _add(self, index: PrefixIndex, request: Request, parent: Node, at: int, count: int) -> Node:
        """Block ``at`` of a request, with its first ``count`` tokens, can be found behind ``parent``."""
        begin = at * index.block_size
        tokens, blocks = (
            tuple(request.tokens[begin : begin + count]),
            [request.tables[name][at] for name in self.groups],
        )
        if self.owners > 1:
            blocks = self._joined(parent, at, tokens, blocks)
            if count < index.block_size and all(block == NO_BLOCK for block in blocks):
                return parent
        node = index.add(parent, tokens, blocks)
        for name, block, kept in zip(self.groups, blocks, node.blocks, strict=True):
            if block == kept != NO_BLOCK:
                self.pools[name].keep(block, request.tenant)
        return node

    def _give_back(self, request: Request, name: str, *, since: int | None = None) -> None:
        """Blocks before the window; they lie side by side but where blocks behind ``since`` came from a disk."""
        table = request.tables[name]
        at = min(self.first_block(self.groups[name], request.computed), len(table)) - 1
        if since is not None:
            at = min(at, since - 1)
        while at >= 0 and table[at] != NO_BLOCK:
            if request in self._unverified:
                self._doubtful[name].add(table[at])
            self.pools[name].release(table[at])
            request.tables.drop(name, at)
            self.changes += 1
            at -= 1

    def _clear(self, request: Request) -> None:
        """What only this request holds is made zero before another gets it, and isn't found any more."""
        for i, (name, pool) in enumerate(self.pools.items()):
            held = [block for block in request.tables.get(name, ()) if block != NO_BLOCK]
            own = [block for block in held if pool.holders(block) - pool.pins(block) == 1]
            for block in own:
                if self.index is not None:
                    self.index.discard(i, block)
                pool.drop(block)
            self.clears.setdefault(name, []).extend(own)

    def _not_cleared(self, name: str, block: int) -> None:  # what is written before the step isn't cleared by it
        if block in self.clears.get(name, ()):
            self.clears[name].remove(block)

    def _first_blocks(self, position: int) -> list[int]:
        return [self.first_block(group, position) for group in self.groups.values()]

    def _take_all(self, request: Request) -> None:
        if self.copies:
            self._cancel_copies(request)
        for name, table in request.tables.items():
            if request in self._unverified:
                self._doubtful[name].update(block for block in table if block != NO_BLOCK)
            for block in reversed(table):  # the last goes first: without those before it is of no use to anybody
                if block != NO_BLOCK:
                    self.pools[name].release(block)
        request.tables.replace({})
        request.capacity = request.computed = 0

    def _cancel_copies(self, request: Request) -> None:
        """Makes no copy to a block that only this request holds, which is about to release it."""
        for name, table in request.tables.items():
            pool, pairs = self.pools[name], self.copies.get(name, [])
            for pair in [
                pair for pair in pairs if pair[1] in table and pool.holders(pair[1]) - pool.pins(pair[1]) == 1
            ]:
                pairs.remove(pair)
                self._unpin((name, block) for block in pair)

    def forget(self, namespace: Namespace | None) -> int:
        """Nothing of a namespace, or of any, is found any more; returns how many files that were."""
        if self.index is not None:
            self.index.clear(namespace)
        if self._slots is not None:
            self._slots.forget(namespace)
        return 0 if self.disk is None else self.disk.store.delete(namespace)

    def lose(self, name: str, blocks: Iterable[int]) -> None:
        """What blocks of a group held is gone, and nobody holds them: nothing finds it any more."""
        for block in blocks:
            if self.index is not None:
                self.index.discard(list(self.groups).index(name), block)
            self.pools[name].drop(block)

    def save_all(self, disk: DiskTier) -> None:
        """Writes all that can be found: what comes first last, so that it is deleted last."""
        for node in reversed(self.index.nodes() if self.index is not None else []):
            disk.leaving(node, wait=True)

    def _evicted(self, group: int, block: int) -> None:
        if self._slots is not None:
            self._slots.evicted(block)
            return
        assert self.index is not None
        if self.disk is not None:
            self.disk.leaving(self.index.node(group, block))
        self.index.forget(group, block)

    def _drop(self, group: int, block: int) -> None:
        list(self.pools.values())[group].drop(block)


def _is_ahead(other: Request, request: Request, end: int) -> bool:
    """Whether ``other`` has yet to compute tokens of a prompt of which the first ``end`` are this one's, too."""
    return (
        other.computed < end <= min(len(other.tokens), len(request.tokens))
        and other.remaining > 1
        and other.namespace == request.namespace
        and other.tokens[:end] == request.tokens[:end]
    )
