"""The interface of a kind of cache, which the cache manager asks about every cache group.

A kind answers for the blocks of one group: their bytes, how many a request needs, how much of a prefix is of use, what
happens after a step, after rejected drafts, and where a beam search branches. It takes and gives back blocks by its
pool and by a ``BlockHolder``. A new kind is a class in a file here, and its row in ``table.KINDS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol

from enginewright.runtime.requests.block_tables import NO_BLOCK
from enginewright.runtime.requests.request import Request

from ...shared.contracts import CacheGroup, ExecutorCaps


class Pool(Protocol):
    """The blocks of a group; see ``kv_cache.block_pool.BlockPool``.

    Attributes:
        split: blocks of a table, from a multiple of this on, that have one owner.
    """

    split: int

    def available(self, tenant: str = "") -> int:
        """Returns the number of blocks that a tenant can have."""

    def available_like(self, block: int, tenant: str = "") -> int:
        """Returns the number of blocks of a block's owner that a tenant can have."""

    def certain(self, sequences: int) -> tuple[int, int]:
        """Returns the number of blocks that all of ``sequences`` together can have, and of how many each takes a
        multiple."""

    def share(self, block: int) -> None:
        """Adds a holder to a block that is held or kept."""

    def release(self, block: int) -> None:
        """Takes a holder from a block."""


class BlockHolder(Protocol):
    """The part of the cache manager that changes the tables of requests."""

    def copy_block(self, request: Request, name: str, source: int) -> None:
        """Makes the request's next block of a group a copy of ``source``; the next step makes the copy."""

    def give_back(self, request: Request, name: str, at: int) -> None:
        """Releases the block at place ``at`` of a request's table, which gets a hole there."""


class CacheKind:
    """The blocks of one cache group. The defaults are those of blocks that hold K tokens each, one after the other.

    Args:
        group: the cache group.
        pool: its blocks.
        holder: changes the tables of requests.
        step_tokens: most tokens of a request in one step.

    Attributes:
        may_lose: whether what comes after a lost block in a prefix may still be of use.
        fixed: whether a request needs as many blocks for few tokens as for many, so that ``enough_tokens`` alone says
            how many blocks there are.
        found_as: how others find what a request computed. "blocks": by their tokens, and several requests hold one;
            "slots": one request after the other goes on in a block; "copies": at some places only, as a copy.
    """

    may_lose: ClassVar[bool] = False
    fixed: ClassVar[bool] = False
    found_as: ClassVar[Literal["blocks", "slots", "copies"]] = "blocks"

    @classmethod
    def takes(cls, group: CacheGroup, caps: ExecutorCaps) -> bool:
        """Returns True if the group, on an executor with these capabilities, is of this kind."""
        raise NotImplementedError

    @classmethod
    def bytes_of(cls, group: CacheGroup) -> int:
        """Returns the bytes of one block over all layers of the group."""
        raise NotImplementedError

    @classmethod
    def movable_bytes(cls, group: CacheGroup, layers: int) -> int:
        """Returns the bytes of one block that may wait on a disk, where ``layers`` layers choose what they look at."""
        return 0

    @classmethod
    def enough_tokens(cls, group: CacheGroup, requests: int, step_tokens: int, split_tokens: int) -> int:
        """Returns the tokens with which nobody ever waits for a block, however long requests are; 0 if there is no such
        number.

        Args:
            group: the cache group.
            requests: how many run at a time.
            step_tokens: most tokens of one step.
            split_tokens: tokens that have one owner, times the owners; 0 for one owner.
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
        """Returns the tokens that a table of ``blocks`` has room for."""
        return blocks * self.size

    def room(self, tokens: int, sequences: int) -> int:
        """Returns ``tokens``, or what the pool can hold of each of ``sequences`` at a time, if that is fewer."""
        blocks, multiple = self.pool.certain(sequences)
        return min(tokens, blocks // multiple // sequences * multiple * self.size)

    def lacking(self, request: Request, tokens: int) -> int:
        """Returns the blocks that a request has yet to take, at once or bit by bit, to hold ``tokens``."""
        return max(self.blocks_for(tokens) - len(request.tables.get(self.name, ())), 0)

    def first_block(self, position: int) -> int:
        """Returns the first place of a table that a query at ``position``, or a later one, sees."""
        return 0

    def usable_prefix(self, blocks: Sequence[int], tokens: int, size: int) -> int:
        """Returns the longest beginning after which a request can go on: ``tokens``, or fewer that are whole blocks.

        Args:
            blocks: what the index has of this group for each ``size`` tokens of the prefix; NO_BLOCK for nothing.
            tokens: the prefix's length.
            size: tokens of a block of the index, which are K where blocks are shared.
        """
        while tokens:
            first = self.first_block(tokens)
            seen = blocks[first : self.blocks_for(tokens)]
            if NO_BLOCK not in seen:
                return tokens
            tokens = self.tokens_in(first + len(seen) - 1 - seen[::-1].index(NO_BLOCK))
        return 0

    def begin(self, request: Request, blocks: Sequence[int], tokens: int) -> int:
        """Has a request without blocks begin with ``tokens`` of a prefix, as ``usable_prefix`` allows.

        ``blocks``: see there; those up to the one of the last token.

        Returns the block that the request goes on in a copy of; NO_BLOCK for none.
        """
        whole, part = divmod(tokens, self.size)
        first = min(self.first_block(tokens), whole)
        request.tables.put(self.name, [NO_BLOCK] * first)
        for block in blocks[first:whole]:
            self.pool.share(block)
            request.tables.extend(self.name, [block])
        return blocks[whole] if part else NO_BLOCK

    def indexed(self, request: Request, at: int, tokens: int, full: bool) -> int:
        """Returns the block that others may find for block ``at`` of the index; NO_BLOCK for none.

        ``tokens``: tokens of the request up to the block's end. ``full``: whether the block of the index is full; the
        last one of a request that ends may not be. The block is in the request's table.
        """
        return request.tables[self.name][at]

    def after_step(self, request: Request) -> None:
        """Takes note that a step has computed ``request.computed`` tokens: what no later step needs is given back."""

    def after_read(self, request: Request, since: int) -> None:
        """Does the work of ``after_step`` where the blocks from place ``since`` on were read from a disk."""

    def before_drafts(self, request: Request) -> bool:
        """Keeps what ``rollback`` needs, as the next step has drafts; returns False if there is no block for it."""
        return True

    def rollback(self, request: Request, start: int, tokens: int) -> int:
        """Returns how many of the first ``tokens`` the blocks still hold, where a step from ``start`` on has computed
        wrong ones after them: rejected drafts. It is ``start`` or more."""
        return tokens

    def can_fork(self, source: Request, request: Request) -> bool:
        """Returns True if there is a block for what ``fork`` copies."""
        whole, part = divmod(source.computed, self.size)
        return not part or self.pool.available_like(source.tables[self.name][whole], request.tenant) > 0

    def fork(self, source: Request, request: Request) -> None:
        """Has a request without blocks begin with all that ``source`` has computed, each writing to its own blocks."""
        whole, part = divmod(source.computed, self.size)
        for block in (table := source.tables[self.name][:whole]):
            if block != NO_BLOCK:
                self.pool.share(block)
        request.tables.put(self.name, table)
        if part:
            self.holder.copy_block(request, self.name, source.tables[self.name][whole])
