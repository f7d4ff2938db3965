"""The base class of the kinds of cache, which the cache manager calls for every cache group.

A kind knows about the blocks of one group: their bytes, the number that a request needs, the usable part of a cached
prefix, and the changes after a step, after rejected drafts and when a beam search branches. It takes and releases
blocks through a `Pool` and a `BlockHolder`. A new kind is a class in a file of this folder, and a row of
``table.KINDS``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, Protocol, TypeAlias

from enginewright.runtime.requests.block_tables import NO_BLOCK
from enginewright.runtime.requests.request import Request

from ...shared.contracts import CacheGroup, ExecutorCaps

FoundAs: TypeAlias = Literal["blocks", "slots", "copies"]
"""The ways in which requests reuse computed tokens of others: see `CacheKind.found_as`."""


class Pool(Protocol):
    """The blocks of a group; implemented by ``kv_cache.block_pool.BlockPool``.

    Attributes:
        split: number of consecutive blocks of a table that belong to the same owner, such as a rank; aligned to
            multiples of it.
    """

    split: int

    def available(self, tenant: str = "") -> int:
        """Returns the number of blocks that ``tenant`` can take now."""

    def available_like(self, block: int, tenant: str = "", *, force: bool = False) -> int:
        """Returns the number of blocks that ``tenant`` can take now from the owner of ``block``.

        ``force``: True if all blocks that another tenant keeps may be evicted.
        """

    def certain(self, sequences: int) -> tuple[int, int]:
        """Returns (blocks, unit): the number of blocks that the pool can always give to ``sequences`` requests
        together.

        Each request takes a multiple of ``unit`` blocks.
        """

    def share(self, block: int) -> None:
        """Adds a reference to a block that a request holds or that is cached."""

    def release(self, block: int) -> None:
        """Removes a reference from a block. Without references, the pool may reuse the block."""


class BlockHolder(Protocol):
    """The part of the cache manager that changes the block tables of requests."""

    def allocate(self, request: Request, name: str) -> int:
        """Takes one more block of the group ``name`` for a request, and returns it."""

    def copy_block(self, request: Request, name: str, source: int) -> None:
        """Appends a block to the request's table of the group ``name``; the next step copies the block ``source``
        to it.
        """

    def give_back(self, request: Request, name: str, at: int) -> None:
        """Releases block number ``at`` of the request's table of the group ``name``, and puts NO_BLOCK in its place."""

    def doubted(self, blocks: Sequence[tuple[str, int]]) -> bool:
        """Returns True if one of these blocks, each with its group's name, may have keys that aren't finite."""


class CacheKind:
    """The blocks of one cache group. The base class implements blocks of K tokens each, all of which a request keeps.

    Args:
        group: the cache group.
        pool: the blocks of the group.
        holder: changes the tables of requests.
        step_tokens: the most tokens of a request in one step.

    Attributes:
        may_lose: True if a prefix is still usable after one of its blocks was lost.
        fixed: True if a request needs the same number of blocks for any number of tokens, so that `enough_tokens`
            alone determines the number of blocks in the pool.
        found_as: the way other requests reuse computed tokens. "blocks": several requests share a block of equal
            tokens; "slots": one request after the other continues in a block; "copies": a request copies a state that
            was stored at some position.
    """

    may_lose: ClassVar[bool] = False
    fixed: ClassVar[bool] = False
    found_as: ClassVar[FoundAs] = "blocks"

    @classmethod
    def takes(cls, group: CacheGroup, caps: ExecutorCaps) -> bool:
        """Returns True if the group is of this kind on an executor with the capabilities ``caps``."""
        raise NotImplementedError

    @classmethod
    def bytes_of(cls, group: CacheGroup) -> int:
        """Returns the bytes of one block over all layers of the group."""
        raise NotImplementedError

    @classmethod
    def movable_bytes(cls, group: CacheGroup, layers: int) -> int:
        """Returns the size in bytes of the part of a block that may be moved to a disk.

        Args:
            group: the cache group.
            layers: the number of its layers that read only selected blocks. The other layers' parts stay in memory.
        """
        return 0

    @classmethod
    def enough_tokens(cls, group: CacheGroup, requests: int, step_tokens: int, split_tokens: int) -> int:
        """Returns the size of a pool, in tokens, that suffices for requests of any length; 0 if no size does.

        Args:
            group: the cache group.
            requests: number of requests that run at a time.
            step_tokens: the most tokens of one step.
            split_tokens: consecutive tokens that belong to one owner, times the number of owners; 0 for one owner.
        """
        return 0

    def __init__(self, group: CacheGroup, pool: Pool, holder: BlockHolder, step_tokens: int) -> None:
        self.group, self.name, self.size = group, group.name, group.block_size
        self.pool = pool
        self.holder = holder
        self.step_tokens = step_tokens

    def blocks_for(self, tokens: int) -> int:
        """Returns the length of the table of a request that holds ``tokens``."""
        return -(-tokens // self.size)

    def tokens_in(self, blocks: int) -> int:
        """Returns the number of tokens that a table of ``blocks`` blocks has room for."""
        return blocks * self.size

    def room(self, tokens: int, sequences: int) -> int:
        """Returns the number of tokens, at most ``tokens``, that the pool can hold for each of ``sequences``
        requests.
        """
        blocks, multiple = self.pool.certain(sequences)
        return min(tokens, blocks // multiple // sequences * multiple * self.size)

    def lacking(self, request: Request, tokens: int) -> int:
        """Returns the number of blocks that a request still lacks to hold ``tokens`` tokens."""
        return max(self.blocks_for(tokens) - len(request.tables.get(self.name, ())), 0)

    def first_block(self, position: int) -> int:
        """Returns the index of the first block in a table that a query at ``position``, or a later one, reads."""
        return 0

    def reads(self, at: int, position: int) -> bool:
        """Returns True if a query at ``position``, or a later one, reads block ``at`` of a table."""
        return at >= self.first_block(position)

    def usable_prefix(self, blocks: Sequence[int], tokens: int, size: int) -> int:
        """Returns the length in tokens of the longest usable beginning of a cached prefix.

        Args:
            blocks: this group's block for each ``size`` tokens of the prefix; NO_BLOCK where the block was lost.
            tokens: length of the prefix.
            size: tokens of a block in the prefix index; K where blocks are shared.
        """
        while tokens:
            first = self.first_block(tokens)
            seen = blocks[first : self.blocks_for(tokens)]
            if NO_BLOCK not in seen:
                return tokens
            tokens = self.tokens_in(first + len(seen) - 1 - seen[::-1].index(NO_BLOCK))
        return 0

    def begin(self, request: Request, blocks: Sequence[int], tokens: int) -> int:
        """Gives a request without blocks the first ``tokens`` tokens of a cached prefix, a number that
        `usable_prefix` returned.

        ``blocks`` are this group's blocks of the prefix up to the last token's. Returns the block whose copy the
        request continues in, or NO_BLOCK if it needs no copy.
        """
        whole, part = divmod(tokens, self.size)
        table = [block if self.reads(at, tokens) else NO_BLOCK for at, block in enumerate(blocks[:whole])]
        for block in table:
            if block != NO_BLOCK:
                self.pool.share(block)
        request.tables.put(self.name, table)
        return blocks[whole] if part else NO_BLOCK

    def indexed(self, request: Request, at: int) -> int:
        """Returns the block that the prefix index should store as block ``at`` of a request; NO_BLOCK for none."""
        return request.tables[self.name][at]

    def after_step(self, request: Request) -> None:
        """Releases the blocks that no later step reads, after a step has computed ``request.computed`` tokens."""

    def after_read(self, request: Request, since: int) -> None:
        """Releases the blocks before index ``since`` that no later step reads, after blocks from ``since`` on were read
        from a tier.
        """

    def before_drafts(self, request: Request) -> bool:
        """Stores what `rollback` needs, as the next step has drafts. Returns False if no block is free for it."""
        return True

    def rollback(self, request: Request, known: int, tokens: int) -> int:
        """Removes rejected drafts from a request's blocks. Returns the number of tokens that the blocks still hold.

        The result is between ``known`` and ``tokens``; tokens beyond it have to be computed again.

        Args:
            request: the request.
            known: the number of tokens before the drafts.
            tokens: the number of tokens including the accepted drafts.
        """
        return tokens

    def can_fork(self, source: Request, request: Request, *, force: bool) -> bool:
        """Returns True if the blocks that `fork` copies are free; ``force`` is `Pool.available_like`'s."""
        whole, part = divmod(source.computed, self.size)
        block = source.tables[self.name][whole] if part else NO_BLOCK
        return not part or self.pool.available_like(block, request.tenant, force=force) > 0

    def fork(self, source: Request, request: Request) -> None:
        """Gives a request without blocks all tokens that ``source`` has computed; afterwards each writes to its own
        blocks.
        """
        whole, part = divmod(source.computed, self.size)
        for block in (table := source.tables[self.name][:whole]):
            if block != NO_BLOCK:
                self.pool.share(block)
        request.tables.put(self.name, table)
        if part:
            self.holder.copy_block(request, self.name, source.tables[self.name][whole])


def numbers_found_as(way: FoundAs, kinds: Iterable[CacheKind | type[CacheKind]]) -> list[int]:
    """Returns the indices of those of ``kinds`` whose ``found_as`` is ``way``."""
    return [i for i, kind in enumerate(kinds) if kind.found_as == way]
