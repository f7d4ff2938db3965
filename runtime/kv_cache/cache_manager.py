"""Which KV blocks each request holds: taken as its tokens come, found where others have its beginning, given back.

A request begins with the blocks of the longest prefix that is known, to the token: whole blocks are shared, and one
that is used in part is copied, so that nobody writes to what another reads. What a request has computed can be found
as soon as the step is over, and stays so after its end, until the memory is needed for something else.

Layers with a sliding window need only the last blocks: those before are given back, and a table has holes (NO_BLOCK)
there. A prefix is of use only where the window before its end is there, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from enginewright.plugins.shared.contracts import CacheGroup
from enginewright.runtime.requests.request import Request

from .block_pool import BlockPool
from .prefix_index import NO_BLOCK, Match, Node, PrefixIndex

LEAST_COPIED = 4
"""Fewer tokens of a block are computed rather than copied: a copy moves the whole block."""


@dataclass
class PrefixUse:
    """What the prefix cache did so far.

    Attributes:
        requests: that began, or began again after a preemption, and might have found something.
        hits: those that found a prefix.
        tokens, reused: that they had, and that they found.
        copied_blocks: of prefixes that end within a block, over all groups.
    """

    requests: int = 0
    hits: int = 0
    tokens: int = 0
    reused: int = 0
    copied_blocks: int = 0


@dataclass(slots=True)
class _Place:
    """Where in the index a request is.

    Attributes:
        node: of its last full block that can be found, or the root.
        blocks: so many lie up to there.
        ran: whether a step of it is over; before that, a block that is to be copied has nothing in it.
    """

    node: Node
    blocks: int
    ran: bool = False


class CacheManager:
    """See the module. Knows numbers of blocks; their memory is the executor's.

    Args:
        groups: cache groups of the program.
        blocks: of each group's pool.
        step_tokens: most tokens of a request in one step.
        shared_blocks: whether the executor takes blocks of several holders, and tables with holes. Without it nothing
            is given back before a request's end.
        prefix_cache: whether requests find what others have computed, if the executor takes shared blocks, and the
            groups' blocks have one size.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        blocks: Mapping[str, int],
        *,
        step_tokens: int,
        shared_blocks: bool,
        prefix_cache: bool,
    ) -> None:
        self.groups = {g.name: g for g in groups}
        self.index: PrefixIndex | None = None
        if prefix_cache and shared_blocks and len({g.block_size for g in groups}) == 1:
            self.index = PrefixIndex(groups[0].block_size, [g.window > 0 for g in groups], self._drop)
        self.pools = {g.name: BlockPool(blocks[g.name], partial(self._evicted, i)) for i, g in enumerate(groups)}
        self.use = PrefixUse()
        self.changes = 0  # grows when there may be more blocks, or more to find, than before
        self.copies: dict[str, list[tuple[int, int]]] = {}  # group -> (from, to), to be made before the next step
        self.windows = tuple(g.name for g in groups if g.window and shared_blocks)
        self._step_tokens = step_tokens
        self._places: dict[Request, _Place] = {}

    def most_held(self, group: CacheGroup, tokens: int) -> int:
        """Most tokens that a request of so many tokens ever holds blocks for in a group."""
        if group.name not in self.windows:
            return tokens
        return min(tokens, group.window + self._step_tokens + 2 * group.block_size)

    def begin(self, request: Request, others: Iterable[Request], promised: Mapping[str, int], *, force: bool) -> bool:
        """Has a request begin with what is known of its tokens: sets its tables and what counts as computed.

        Args:
            request: one without blocks.
            others: requests that run. If one is about to compute this one's next block, that is waited for.
            promised: cache group -> blocks that others will take. There must be enough left for its tokens so far.
            force: whether all of another tenant's blocks may be evicted.

        Returns:
            False, and it has no blocks, if it has to wait.
        """
        if self.index is None:
            return self._has_blocks_for(request, promised, force)
        index, size = self.index, self.index.block_size
        match = Match((), 0)
        if not request.scores:  # whose every row is computed
            match = index.find(request.namespace, request.tokens, len(request.tokens) - 1)
        tokens = self._usable(match)
        if not request.scores and any(_is_ahead(other, request, tokens // size * size + size) for other in others):
            return False
        whole = tokens // size
        for i, (name, group) in enumerate(self.groups.items()):
            first = min(self.first_block(group, tokens), whole)
            table = array("i", [NO_BLOCK] * first)
            for node in match.nodes[first:whole]:
                self.pools[name].share(node.blocks[i])
                table.append(node.blocks[i])
            request.tables[name] = table
        request.computed = tokens
        if not self._has_blocks_for(request, promised, force):
            self._take_all(request)
            return False
        request.capacity = whole * size if self.groups else 0
        if tokens % size:
            self._copy(request, match.nodes[whole])
        node = match.nodes[whole - 1] if whole else index.root(request.namespace)
        node.users += 1
        self._places[request] = _Place(node, whole)
        self._count(request)
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
        needed = {
            name: -(-tokens // group.block_size) - len(request.tables.get(name, ()))
            for name, group in self.groups.items()
        }
        for name, count in needed.items():
            if count > 0 and count > self.pools[name].available(request.tenant, force=force):
                return False
        for name, count in needed.items():
            pool, table = self.pools[name], request.tables.setdefault(name, array("i"))
            table.extend(pool.allocate(request.tenant) for _ in range(count))
        request.capacity = min(
            (len(request.tables[name]) * group.block_size for name, group in self.groups.items()), default=tokens
        )
        return True

    def fitting(self, request: Request, count: int, *, force: bool = False) -> int:
        """How many of the next ``count`` tokens fit into the blocks that it has and those that are available."""
        for name, group in self.groups.items():
            available = self.pools[name].available(request.tenant, force=force)
            blocks = len(request.tables.get(name, ())) + available
            count = min(count, blocks * group.block_size - request.computed)
        return count

    def stepped(self, request: Request) -> None:
        """After a step of a request: blocks that got full can be found, and those before a window are given back."""
        if self.index is not None:
            self._add_full_blocks(self.index, request)
        for name in self.windows:
            self._give_back(request, name)

    def release(self, request: Request) -> None:
        """Takes all blocks of a request. What it computed can be found as long as nobody needs the memory."""
        place = self._places.pop(request, None)
        if place is not None:
            assert self.index is not None
            size = self.index.block_size
            whole, part = divmod(request.computed, size)
            # What lies in the last block can be found, too, unless the request failed.
            if part and place.ran and whole == place.blocks and request.error is None and not place.node.detached:
                self._add(self.index, request, place.node, whole, part)
            place.node.users -= 1
            self.index.prune(place.node)
        self._take_all(request)
        self.changes += 1

    def statistics(self) -> dict[str, Any] | None:
        """What the prefix cache did so far, and what blocks are for, of each group; None without a prefix cache.

        ``unused_tokens`` is the waste: places in held blocks that no token of their requests has come to yet.
        """
        if self.index is None:
            return None
        blocks = {}
        for name, pool in self.pools.items():
            held = pool.total_blocks - pool.free_blocks
            blocks[name] = {"held": held, "shared": pool.shared_blocks, "kept": pool.kept_blocks}
            blocks[name] |= {"free": pool.free_blocks - pool.kept_blocks, "evictions": pool.evictions}
            blocks[name]["unused_tokens"] = sum(
                len(request.tables[name]) * self.groups[name].block_size - request.computed for request in self._places
            )
        return asdict(self.use) | {"blocks": blocks}

    @staticmethod
    def first_block(group: CacheGroup, position: int) -> int:
        """The first block of a group that a query at ``position``, or a later one, sees."""
        return max(position - group.window + 1, 0) // group.block_size if group.window else 0

    def _has_blocks_for(self, request: Request, promised: Mapping[str, int], force: bool) -> bool:
        return all(
            promised[name] + needed <= self.pools[name].available(request.tenant, force=force)
            for name, needed in self.lacking(request, len(request.tokens)).items()
        )

    def _usable(self, match: Match) -> int:
        """How many tokens of a match are of use: every group has the blocks that the next token sees."""
        assert self.index is not None
        size = self.index.block_size
        in_a_row = []  # of each group, for each number of nodes: how many of the last have a block
        for i in range(len(self.groups)):
            of = [0]
            for node in match.nodes:
                of.append(of[-1] + 1 if node.blocks[i] != NO_BLOCK else 0)
            in_a_row.append(of)
        ends = list(range(match.tokens // size * size, 0, -size))
        if match.tokens % size >= LEAST_COPIED:
            ends.insert(0, match.tokens)
        for tokens in ends:
            blocks = -(-tokens // size)
            needed = [blocks - self.first_block(group, tokens) for group in self.groups.values()]
            if all(of[blocks] >= count for of, count in zip(in_a_row, needed, strict=True)):
                return tokens
        return 0

    def _copy(self, request: Request, node: Node) -> None:
        """The block in which a prefix ends becomes the request's own."""
        sources = tuple(node.blocks)  # taking a block may evict them, but nothing writes to them before the copy
        for source, (name, pool) in zip(sources, self.pools.items(), strict=True):
            request.tables[name].append(block := pool.allocate(request.tenant))
            self.copies.setdefault(name, []).append((source, block))
            request.capacity = len(request.tables[name]) * self.groups[name].block_size
            self.use.copied_blocks += 1

    def _count(self, request: Request) -> None:
        if not request.scores:
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
        blocks = [request.tables[name][at] for name in self.groups]
        node = index.add(parent, tuple(request.tokens[begin : begin + count]), blocks)
        for name, block, kept in zip(self.groups, blocks, node.blocks, strict=True):
            if block == kept != NO_BLOCK:
                self.pools[name].keep(block, request.tenant)
        return node

    def _give_back(self, request: Request, name: str) -> None:
        table = request.tables[name]
        at = min(self.first_block(self.groups[name], request.computed), len(table)) - 1
        while at >= 0 and table[at] != NO_BLOCK:
            self.pools[name].release(table[at])
            table[at] = NO_BLOCK
            self.changes += 1
            at -= 1

    def _take_all(self, request: Request) -> None:
        if self.copies:
            for name, table in request.tables.items():
                self.copies[name] = [copy for copy in self.copies.get(name, []) if copy[1] not in table]
        for name, table in request.tables.items():
            for block in reversed(table):  # the last goes first: without those before it is of no use to anybody
                if block != NO_BLOCK:
                    self.pools[name].release(block)
        request.tables = {}
        request.capacity = request.computed = 0

    def _evicted(self, group: int, block: int) -> None:
        assert self.index is not None
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
