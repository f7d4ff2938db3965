"""Finds the longest prefix of a request's tokens that other requests have computed and whose blocks still exist."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from enginewright.runtime.requests.block_keys import Item, common_items
from enginewright.runtime.requests.block_tables import NO_BLOCK
from enginewright.runtime.requests.request import Request

from .candidate import Candidate
from .held_blocks import HeldBlocks
from .kinds.base import numbers_found_as
from .prefix_index import Items, Match, Node, PrefixIndex
from .tier import Found, Tier

LEAST_COPIED = 4
"""The fewest tokens of a partly used block for which it is copied. Fewer are computed again, which is faster."""

REQUESTS_SHARE = 4
"""A prompt's snapshots take at most 1/REQUESTS_SHARE of the pool's states, but may always take two."""


@dataclass
class PrefixUse:
    """Counts of the prefix cache so far.

    Attributes:
        requests: requests that began and looked for a prefix; a preempted request counts again.
        hits: requests that found a prefix.
        tokens: tokens of all ``requests``.
        reused: tokens of the prefixes that were found.
        copied_blocks: blocks of all groups that were copied because a prefix ended within them.
        snapshots: states of recurrent layers that steps stored for later requests.
        from_disk, from_host: tokens of ``reused`` that were read from a disk, and from copies in main memory.
    """

    requests: int = 0
    hits: int = 0
    tokens: int = 0
    reused: int = 0
    copied_blocks: int = 0
    snapshots: int = 0
    from_disk: int = 0
    from_host: int = 0


class Prefixes:
    """No prefix cache: every request computes all of its tokens. The classes that find prefixes derive from this.

    Args:
        held: the blocks that requests hold.

    Attributes:
        finds: True if prefixes can be found.
        index: the tree of blocks by their tokens; None if blocks aren't found by tokens.
        tiered: True if evicted blocks may be kept in a tier.
        use: the counts so far.
    """

    finds = False
    tiered = False

    def __init__(self, held: HeldBlocks) -> None:
        self.held = held
        self.index: PrefixIndex | None = None
        self.use = PrefixUse()

    def begin(self, candidate: Candidate) -> bool:
        """Begins a request without a prefix. Returns False if there are too few blocks; see ``CacheManager.begin``."""
        return self.held.has_blocks_for(candidate)

    def snapshots(self, request: Request, end: int) -> Mapping[int, Sequence[int]]:
        """Returns the snapshots to store in a step that computes the tokens of ``request`` up to ``end``.

        Returns:
            Number of tokens that a snapshot includes -> the block of each cache group; NO_BLOCK for groups that hold no
            states.
        """
        return {}

    def cancel_snapshots(self) -> bool:
        """Frees the stored snapshots that requests can't find yet. Returns False if there are none."""
        return False

    def after_step(self, request: Request) -> None:
        """Makes the tokens that a step of a request has computed available to other requests."""

    def fork(self, source: Request, request: Request) -> None:
        """Prepares a request that begins with all tokens that ``source`` has computed."""

    def leave(self, request: Request, *, partly: bool) -> None:
        """Prepares for the release of a request's blocks.

        ``partly``: True if a partly filled last block can be found too.
        """

    def evicted(self, group: int, block: int, tier: Tier | None) -> None:
        """Removes an evicted block from those that can be found: it is about to get other tokens.

        Args:
            group: the number of the cache group.
            block: the block.
            tier: the tier that may keep the block's contents; None for none.
        """

    def discard(self, group: int, block: int) -> None:
        """Removes a block of cache group number ``group``, which requests may hold, from those that can be found."""

    def forget(self, tenant: str | None) -> None:
        """Removes a tenant's prefixes from those that can be found; all prefixes if ``tenant`` is None."""

    def _count(self, request: Request) -> None:
        """Adds a request that has begun to the counts of the prefix cache."""
        if not request.wants_prompt:
            self.use.requests += 1
            self.use.hits += request.computed > 0
            self.use.tokens += len(request.tokens)
            self.use.reused += request.computed
        if request.cached_tokens is None:
            request.cached_tokens = request.computed


class _Place(msgspec.Struct):
    """A request's position in the prefix index.

    Attributes:
        node: the node of its last indexed block, or the root.
        blocks: the number of blocks up to that node.
        computed: the number of tokens that its steps have computed; -1 before its first step is over, when the copy of
            its last block may still be empty. Unlike ``Request.computed`` it never includes a step in flight.
        state_at: the number of tokens that its states include after the submitted steps.
        wanted: the numbers of tokens after which its states are to be stored, the most useful first.
        snapshots: stored snapshots that aren't in the index yet: number of tokens -> the block of each group.
        doubted: blocks in the index that no finite row follows yet: group and block of each.
    """

    node: Node
    blocks: int
    computed: int = -1
    state_at: int = -1
    wanted: list[int] = msgspec.field(default_factory=list)
    snapshots: dict[int, list[int]] = msgspec.field(default_factory=dict)
    doubted: list[tuple[int, int]] = msgspec.field(default_factory=list)


class IndexedPrefixes(Prefixes):
    """Finds blocks by their tokens: blocks of running requests, of ended requests, and in a tier.

    A request begins with the blocks of the longest known prefix, exact to the token: whole blocks are shared, and a
    block that is used in part is copied. Computed tokens can be found as soon as their step is over, and after the
    request's end until the memory is needed for something else.

    With recurrent layers a request begins where a snapshot of their states was stored. Snapshots are stored where two
    known prompts diverge, before the last token of each prompt, about 1, 2, 4, ... blocks before its end, and at a
    request's end. A snapshot is found once its block of the index is full, or at the request's end.

    Args:
        held: the blocks that requests hold.
        block_size: tokens of a block, the same in all groups whose blocks are found by tokens.
    """

    finds = True
    tiered = True

    def __init__(self, held: HeldBlocks, block_size: int) -> None:
        super().__init__(held)
        self._kinds = list(held.kinds.values())
        self._with_keys = numbers_found_as("blocks", self._kinds)
        self._with_states = numbers_found_as("copies", self._kinds)
        self._keys = {self._kinds[i].name for i in self._with_keys}
        self.index: PrefixIndex = PrefixIndex(block_size, [kind.may_lose for kind in self._kinds], self._drop)
        self._pools = list(held.pools.values())
        self._divided = [i for i, pool in enumerate(self._pools) if pool.split > 1]
        self.places: dict[Request, _Place] = {}

    def begin(self, candidate: Candidate) -> bool:
        """Begins a request with its longest known prefix.

        Returns False if there are too few blocks; see ``CacheManager.begin``.
        """
        request, match = candidate.request, Match((), 0)
        index, held, size = self.index, self.held, self.index.block_size
        if not request.wants_prompt:  # whose every row is computed
            match = index.find(request.namespace, request.items, len(request.items) - 1)
        ends = self._ends(match, request.items[:-1], candidate.tier)
        if not request.wants_prompt and self._waits(candidate, next(iter(ends))):
            return False
        # A copy pins its whole source, which may be the only block left. Where that can't be, fewer tokens are reused:
        # whole blocks, then none.
        for tokens, states in ends.items():
            if self._with_states and not states:  # a part of a block is read from the tier
                tokens -= tokens % size
            sources = self._begin_with(request, match, tokens, states)
            copied = _pins(held, sources)
            doubted = tokens % size > 0 and held.doubted(
                [(name, block) for name, block in copied if name in self._keys]
            )
            if not doubted and held.has_blocks_for(candidate, sources):
                break
            held.unpin(_pins(held, sources))
            held.take_all(request)
            if not copied:
                return False
        whole = tokens // size
        held.set_capacity(request, 0)
        node = match.nodes[whole - 1] if whole else index.root(request.namespace)
        node.users += 1
        self.places[request] = place = _Place(node, whole)
        if self._with_states:
            place.wanted = self._wanted(request, match.tokens)
        try:
            if not self._read(candidate, place):
                stored = tokens > 0 and self._with_states and not states
                if stored and not self._read_states(request, place, candidate.tier):
                    self.leave(request, partly=False)
                    held.take_all(request)
                    return self.begin(replace(candidate, tier=None))
                self._copy(request, sources)
        finally:
            held.unpin(copied)
        self._count(request)
        return True

    def after_step(self, request: Request) -> None:
        """Implements ``Prefixes``: adds the blocks that the step has filled to the index."""
        place = self.places[request]
        place.computed, place.state_at = request.computed, max(place.state_at, request.computed)
        if place.doubted and not self.held.is_doubted(request):
            place.doubted.clear()
        if place.blocks == request.computed // self.index.block_size:
            return
        node, at = place.node, place.blocks
        if node.detached:  # a prefix of the same tokens, which it didn't hold, is lost: its own takes the place
            node, at = self.index.root(request.namespace), 0
        while (at + 1) * self.index.block_size <= request.computed:
            parent, node = node, self._add(request, node, at, self.index.block_size)
            self._add_snapshots(request, place, parent, at)
            at += 1
        node.users += 1
        place.node.users -= 1
        self.index.prune(place.node)
        place.node, place.blocks = node, at
        self.held.changes += 1

    def fork(self, source: Request, request: Request) -> None:
        """Implements ``Prefixes``. The request gets the position of ``source`` in the index."""
        if (place := self.places.get(source)) is not None:
            place.node.users += 1
            self.places[request] = _Place(place.node, place.blocks)

    def leave(self, request: Request, *, partly: bool) -> None:
        """Implements ``Prefixes``. The request's last block, if it isn't full, can be found too, unless it failed."""
        if (place := self.places.pop(request, None)) is None:
            return
        whole, part = divmod(request.computed, self.index.block_size)
        sound = place.computed >= 0 and request.error is None and not place.node.detached
        if partly and whole == place.blocks and sound:
            last = self._add(request, place.node, whole, part) if part else place.node
            if place.state_at == request.computed and self._with_states:
                self._leave_state(request, place)
            self._add_snapshots(request, place, place.node, whole)
            if last is not place.node:
                self.index.prune(last)
        if request.error is not None:
            for group, block in place.doubted:
                self.index.discard(group, block)
                self._drop(group, block)
        self._give_up(place, place.snapshots)
        place.node.users -= 1
        self.index.prune(place.node)

    def evicted(self, group: int, block: int, tier: Tier | None) -> None:
        """Implements ``Prefixes``. The block's node goes to the tier first, if there is one."""
        if tier is not None:
            tier.leaving(self.index.node(group, block))
        self.index.forget(group, block)

    def discard(self, group: int, block: int) -> None:
        """Implements ``Prefixes``: removes the block from the index."""
        self.index.discard(group, block)

    def forget(self, tenant: str | None) -> None:
        """Implements ``Prefixes``: removes the tenant's nodes from the index."""
        self.index.clear(tenant)

    def snapshots(self, request: Request, end: int) -> Mapping[int, Sequence[int]]:
        """Implements ``Prefixes``. Takes a block of each group of states for every snapshot, if one is free."""
        place = self.places[request]
        place.state_at = end
        due = [tokens for tokens in place.wanted if request.computed < tokens <= end]
        if not due:
            return {}
        place.wanted = [tokens for tokens in place.wanted if tokens > end]
        for tokens in due:
            if not all(self._pools[i].available(request.tenant) for i in self._with_states):
                break
            blocks = [NO_BLOCK] * len(self._kinds)
            for i in self._with_states:
                blocks[i] = self.held.allocate(request, self._kinds[i].name)
            place.snapshots[tokens] = blocks
            self.use.snapshots += 1
        return {tokens: place.snapshots[tokens] for tokens in due if tokens in place.snapshots}

    def cancel_snapshots(self) -> bool:
        """Implements ``Prefixes``. Snapshots that a step in flight still writes stay."""
        changes = self.held.changes
        for place in self.places.values():
            self._give_up(place, [tokens for tokens in place.snapshots if tokens <= place.computed])
        return self.held.changes > changes

    def _wanted(self, request: Request, matched: int) -> list[int]:
        """Returns the numbers of tokens after which a new request's states are to be stored; see the class.

        Args:
            request: the request, which begins after ``request.computed`` tokens.
            matched: how many of its first tokens are known.
        """
        size, last = self.index.block_size, len(request.tokens) - 1
        block = last // size
        steps = (1 << i for i in range(block.bit_length() + 1))
        ends = [matched, last, *((block + 1 - step) * size for step in steps)]
        pools = [self._pools[i].total_blocks for i in self._with_states]
        most = max(min(pools) // REQUESTS_SHARE, 2)
        return [tokens for tokens in dict.fromkeys(ends) if request.computed < tokens <= last][:most]

    def _add_snapshots(self, request: Request, place: _Place, parent: Node, at: int) -> None:
        """Adds the snapshots within block ``at`` of a request, the child of ``parent``, to the index."""
        first = at * self.index.block_size
        last = min(first + self.index.block_size, request.computed)
        for tokens in [tokens for tokens in place.snapshots if first < tokens <= last]:
            blocks = place.snapshots.pop(tokens)
            added = self.index.add_state(parent, tuple(request.items[first:tokens]), blocks)
            for i in self._with_states:
                if added:
                    self._pools[i].keep(blocks[i], request.tenant)
                    if self.held.is_doubted(request):
                        place.doubted.append((i, blocks[i]))
                self._pools[i].release(blocks[i])

    def _leave_state(self, request: Request, place: _Place) -> None:
        """Turns the state blocks of a request that ends into a snapshot."""
        blocks = [NO_BLOCK] * len(self._kinds)
        for i in self._with_states:
            blocks[i] = request.tables[self._kinds[i].name][0]
        first = place.blocks * self.index.block_size
        parent = place.node
        if first == request.computed and parent.parent is not None:
            parent, first = parent.parent, first - self.index.block_size
        if self.index.add_state(parent, tuple(request.items[first : request.computed]), blocks):
            for i in self._with_states:
                self._pools[i].keep(blocks[i], request.tenant)

    def _give_up(self, place: _Place, ends: Iterable[int]) -> None:
        """Releases the snapshots of a request after ``ends`` tokens, which aren't in the index yet."""
        for blocks in [place.snapshots.pop(tokens) for tokens in tuple(ends)]:
            for i in self._with_states:
                self._pools[i].release(blocks[i])
            self.held.changes += 1

    def _ends(self, match: Match, items: Sequence[Item], tier: Tier | None) -> dict[int, Sequence[int]]:
        """Returns the prefix lengths, in tokens, at which a request may begin, the best first and 0 last.

        Each length has the blocks of its snapshot, one per group. They are () without recurrent layers, or if the
        snapshot is in the tier.

        Args:
            match: the known beginning of the request's items.
            items: the request's items.
            tier: the tier that may have snapshots; None for none.
        """
        size = self.index.block_size
        if not self._with_states:
            return dict.fromkeys((self._usable(match, LEAST_COPIED), self._usable(match, size), 0), ())
        ends: dict[int, Sequence[int]] = {}
        for tokens, blocks in self.index.snapshots(match):
            if (not ends or tokens % size == 0) and self._usable(replace(match, tokens=tokens), 1) == tokens:
                ends[tokens] = blocks
                if tokens % size == 0:
                    break
        ends |= {0: ()}
        if tier is None:
            return ends
        best = next(iter(ends))
        for end in range(match.tokens // size * size, max(best - size, 0), -size):
            if self._usable(replace(match, tokens=end), 1) < end:
                continue
            node = match.nodes[end // size - 1]
            stored = end + tier.part(node, items[end : end + size - 1])
            if stored > best and (stored > end or tier.holds(node)):
                return {stored: ()} | ends
        return ends

    def _usable(self, match: Match, least_part: int) -> int:
        """Returns the number of a match's tokens that all groups with keys can use.

        ``least_part`` is the fewest tokens for which a partly used block is copied.
        """
        tokens, before = match.tokens, -1
        if tokens % self.index.block_size < least_part:
            tokens -= tokens % self.index.block_size
        blocks = {i: [node.blocks[i] for node in match.nodes] for i in self._with_keys}
        while tokens != before:
            before = tokens
            for i, of_kind in blocks.items():
                tokens = self._kinds[i].usable_prefix(of_kind, tokens, self.index.block_size)
        return tokens

    def _waits(self, candidate: Candidate, most: int) -> bool:
        """Returns True if a running request is about to compute more of a request's tokens than the first ``most``.

        With recurrent layers, the running request stores its states where the two diverge.
        """
        request, size = candidate.request, self.index.block_size
        end = most // size * size + size
        for other in candidate.others:
            known = other.computed
            if other in candidate.in_flight:  # ``computed`` may be what it will be
                place = self.places[other]
                known = place.computed if self._with_states else place.blocks * size
            if not _shares(other, request, end, known):
                continue
            # Whole blocks: until its prompt's last row is finite, no block of the other request is copied.
            shared = common_items(other.items, request.items[:-1]) // size * size if self._with_states else end
            if known < shared and shared >= end:
                place = self.places[other]
                if self._with_states and shared not in (*place.wanted, *place.snapshots):
                    place.wanted.insert(0, shared)
                return True
        return False

    def _begin_with(self, request: Request, match: Match, tokens: int, states: Sequence[int]) -> Sequence[int]:
        """Shares the blocks of a match's first ``tokens`` with a request, and pins those that are to be copied.

        ``states`` are the blocks of the snapshot after these tokens. Returns the blocks to copy, one per group;
        NO_BLOCK for none.
        """
        sources, nodes = [], match.nodes[: -(-tokens // self.index.block_size)]
        for i, kind in enumerate(self._kinds):
            blocks = [states[i]] if states and i in self._with_states else [node.blocks[i] for node in nodes]
            sources.append(kind.begin(request, blocks, tokens))
        request.computed = tokens
        for name, source in _pins(self.held, sources):
            self.held.pools[name].pin(source)
        return sources

    def _copy(self, request: Request, sources: Sequence[int]) -> None:
        """Copies the blocks in which a request's prefix ends, one per group; the request continues in the copies."""
        for name, source in _pins(self.held, sources):
            self.held.copy_block(request, name, source)
            self.use.copied_blocks += 1
        self.held.set_capacity(request, 0)

    def _add(self, request: Request, parent: Node, at: int, count: int) -> Node:
        """Adds block ``at`` of a request, with its first ``count`` tokens, to the index as a child of ``parent``."""
        begin = at * self.index.block_size
        items = tuple(request.items[begin : begin + count])
        blocks = [kind.indexed(request, at) for kind in self._kinds]
        if self._divided:
            self._keep_owners(parent, at, items, blocks)
            if count < self.index.block_size and all(block == NO_BLOCK for block in blocks):
                return parent
        node = self.index.add(parent, items, blocks)
        for pool, block, indexed in zip(self._pools, blocks, node.blocks, strict=True):
            if block == indexed != NO_BLOCK:
                pool.keep(block, request.tenant)
        return node

    def _keep_owners(self, parent: Node, at: int, items: Items, blocks: list[int]) -> None:
        """Replaces blocks of a node that have another owner than their neighbours in the same split by NO_BLOCK.

        Args:
            parent: the node before it.
            at: the index of its block in tables.
            items: its items.
            blocks: its block of each group, changed in place.
        """
        place = bisect_left(parent.children, items, key=lambda child: child.items)
        node = parent.children[place] if place < len(parent.children) else None
        if node is not None and node.items != items:
            node = None
        for i in self._divided:
            pool, block = self._pools[i], blocks[i]
            near = [parent.blocks[i]] if at % pool.split else []
            if node is not None and (at + 1) % pool.split:
                near += [child.blocks[i] for child in node.children]
            others = {pool.owner_of(other) for other in near if other != NO_BLOCK}
            if block != NO_BLOCK and others - {pool.owner_of(block)}:
                blocks[i] = NO_BLOCK

    def _read(self, candidate: Candidate, place: _Place) -> bool:
        """Reads a request's next blocks from a tier, up to the first invalid record. Returns True if it has read any.

        The request's last token isn't read: it is always computed.
        """
        request, tier = candidate.request, candidate.tier
        if tier is None or request.wants_prompt:
            return False
        size, first = self.index.block_size, place.blocks
        items, before = request.items[first * size : len(request.items) - 1], len(request.items)
        most = request.computed - first * size  # tokens of a block that another request has computed
        while most < (stored := tier.find(place.node, items, size)).tokens < before:
            if not self._room_for_read(candidate, first, first * size + stored.tokens):
                return False
            in_memory = tier.tokens_in_memory(stored)
            if self._read_blocks(request, first, stored, tier):
                break
            before = stored.tokens  # what can't be read isn't found again
        else:
            return False
        node, place.blocks = place.node, first + stored.tokens // size
        for at in range(first, place.blocks):
            node = self._add(request, node, at, size)
        node.users += 1
        place.node.users -= 1
        place.node = node
        tier.used(stored.names)
        request.computed = place.computed = place.state_at = first * size + stored.tokens  # no copy is pending
        self.held.set_capacity(request, 0)
        self._count_read(stored.tokens, in_memory)
        for kind in self._kinds:
            kind.after_read(request, first)
        return True

    def _room_for_read(self, candidate: Candidate, first: int, end: int) -> bool:
        """Returns True if there are blocks to read the tokens up to ``end`` from a tier, and for the step after that.

        With a sliding window, reading may need more blocks for a while than computing: blocks before the window are
        released only after the read.

        Args:
            candidate: the request, which has blocks for the tokens before the read.
            first: the index of the first block to read.
            end: the number of tokens after the read.
        """
        request = candidate.request
        for name, kind in self.held.kinds.items():
            if kind.found_as != "blocks":
                continue
            past = kind.blocks_for(end)
            behind = kind.blocks_for(min(len(request.tokens), end + kind.step_tokens)) - past
            needed = sum(kind.reads(at, end) for at in range(first, past)) + behind
            available = self.held.pools[name].available(request.tenant, force=candidate.force)
            if needed > available - candidate.promised.get(name, 0):
                return False
        return True

    def _read_states(self, request: Request, place: _Place, tier: Tier | None) -> bool:
        """Reads the states at the end of a request's prefix from a tier; returns False if their record is invalid."""
        blocks = [NO_BLOCK] * len(self._kinds)
        for i in self._with_states:
            name = self._kinds[i].name
            blocks[i] = self.held.allocate(request, name)
            request.tables.extend(name, [blocks[i]])
            self.held.not_cleared(name, blocks[i])
        if tier is None:
            return False
        in_memory = request.computed * tier.states_in_memory(place.node)
        if not tier.read_states(place.node, blocks):
            return False
        self._count_read(request.computed, in_memory)
        place.computed = place.state_at = request.computed  # no copy is pending
        return True

    def _read_blocks(self, request: Request, first: int, stored: Found, tier: Tier) -> bool:
        """Reads blocks from a tier into blocks of a request, and states at their end.

        Args:
            request: the request, which has its first ``first`` blocks of tokens.
            first: the number of the first block to read.
            stored: the blocks that are read.
            tier: the tier.

        Returns:
            False if a record is invalid. The request then has the same blocks as before.
        """
        size, last = self.index.block_size, first + len(stored.names) - 1
        end = first * size + stored.tokens
        for at, name in enumerate(stored.names, first):
            blocks = []
            for i, kind in enumerate(self._kinds):
                states = i in self._with_states
                seen = at == last if states else kind.reads(at, end)
                blocks.append(self.held.allocate(request, kind.name) if seen else NO_BLOCK)
                if seen or not states:
                    request.tables.extend(kind.name, blocks[-1:])
                self.held.not_cleared(kind.name, blocks[-1])
            if not tier.read(name, request.items[at * size : min((at + 1) * size, end)], blocks):
                self.held.cut(request, {kind.name: 0 if kind.fixed else first for kind in self._kinds})
                return False
        return True

    def _count_read(self, tokens: int, in_memory: int) -> None:
        """Counts tokens that were read from a tier, ``in_memory`` of them from main memory."""
        self.use.from_host += in_memory
        self.use.from_disk += tokens - in_memory

    def _drop(self, group: int, block: int) -> None:
        self._pools[group].drop(block)


def _pins(held: HeldBlocks, sources: Sequence[int]) -> list[tuple[str, int]]:
    """Returns cache group and block for each of ``sources`` that isn't NO_BLOCK."""
    return [(name, source) for name, source in zip(held.pools, sources, strict=True) if source != NO_BLOCK]


def _shares(other: Request, request: Request, end: int, known: int) -> bool:
    """Returns True if ``other`` is still computing a prompt with the same first ``end`` tokens as ``request``.

    ``known`` is the number of tokens of ``other`` that can be found already.
    """
    return (
        end <= min(len(other.tokens), len(request.tokens))
        and len(other.tokens) - known > 1
        and other.namespace == request.namespace
        and other.items[:end] == request.items[:end]
    )
