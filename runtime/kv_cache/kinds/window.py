"""The kind of cache for layers with a sliding window, which releases the blocks before the window."""

from __future__ import annotations

from collections.abc import Sequence

from enginewright.runtime.requests.block_tables import NO_BLOCK
from enginewright.runtime.requests.request import Request

from ...shared.contracts import CacheGroup, ExecutorCaps
from .base import BlockHolder, Pool
from .paged import PagedCache


class WindowCache(PagedCache):
    """The cache of layers with a sliding window: a query at p reads the keys p-window+1 .. p.

    ::

        table:  | -1 | -1 | block | block | block |
                released | the window before the next token

    A table has holes (NO_BLOCK) before the window. A prefix is usable only if all blocks of the window before its end
    are cached. Consecutive blocks of one owner are released together.

    A group may keep its first tokens too, which every query reads (``CacheGroup.first``). A prefix then needs these::

        table:  | block | block | -1 | -1 | block | block | block |
                the first tokens          the window before the next token
    """

    may_lose = True

    @classmethod
    def takes(cls, group: CacheGroup, caps: ExecutorCaps) -> bool:
        """Implements ``CacheKind``: True for groups with a window, if the executor can share blocks."""
        return group.window > 0 and caps.shared_blocks and super().takes(group, caps)

    @classmethod
    def enough_tokens(cls, group: CacheGroup, requests: int, step_tokens: int, split_tokens: int) -> int:
        """Implements ``CacheKind``.

        The pool holds the blocks of all running requests and of one chunk, and as many blocks again for cached
        prefixes: `BlockPool` reserves up to half of the pool for other tenants. A second cache, of the ends of
        requests, has no such blocks: it is there to save memory.
        """
        held = _held_tokens(group, requests, 2 * step_tokens, split_tokens or group.block_size)
        return held if group.holds_ends else 2 * held

    def __init__(self, group: CacheGroup, pool: Pool, holder: BlockHolder, step_tokens: int) -> None:
        super().__init__(group, pool, holder, step_tokens)
        self._window, self._split = group.window, pool.split
        self._unit = pool.split * group.block_size  # tokens whose blocks are released together
        self._kept = group.first // group.block_size  # blocks at the beginning

    def room(self, tokens: int, sequences: int) -> int:
        """Implements ``CacheKind``: any number of tokens, if the pool has the blocks of all windows."""
        blocks, _ = self.pool.certain(sequences)
        return tokens if self._window_tokens(sequences) <= blocks * self.size else super().room(tokens, sequences)

    def lacking(self, request: Request, tokens: int) -> int:
        """Implements ``CacheKind``. A request never holds more blocks than its window and a step need."""
        before = self.first_block(request.computed)
        held = len(request.tables.get(self.name, ())) - before + min(self._kept, before)
        most = self.blocks_for(min(tokens, self._window_tokens(1)))
        return max(min(super().lacking(request, tokens), most - held), 0)

    def first_block(self, position: int) -> int:
        """Implements ``CacheKind``: the first block of the window, rounded down to a whole split."""
        return max(position - self._window + 1, 0) // self._unit * self._split

    def reads(self, at: int, position: int) -> bool:
        """Implements ``CacheKind``: True for the blocks of the window and the first ones."""
        return at < self._kept or super().reads(at, position)

    def usable_prefix(self, blocks: Sequence[int], tokens: int, size: int) -> int:
        """Implements ``CacheKind``: the prefix ends before the first of the kept blocks that was lost."""
        first_blocks = list(blocks[: self._kept])
        if NO_BLOCK in first_blocks:
            tokens = min(tokens, first_blocks.index(NO_BLOCK) * size)
        return super().usable_prefix(blocks, tokens, size)

    def after_step(self, request: Request) -> None:
        """Implements ``CacheKind``. Releases the blocks before the window."""
        self._give_back(request, self.first_block(request.computed) - 1)

    def after_read(self, request: Request, since: int) -> None:
        """Implements ``CacheKind``. Blocks from ``since`` on that the window doesn't reach are holes already."""
        self._give_back(request, min(self.first_block(request.computed), since) - 1)

    def _window_tokens(self, sequences: int) -> int:
        """Returns the most tokens whose blocks ``sequences`` requests hold together at any time."""
        return _held_tokens(self.group, sequences, self.step_tokens, self._unit)

    def _give_back(self, request: Request, at: int) -> None:
        """Releases the blocks before index ``at`` of the request's table that aren't released yet."""
        table = request.tables[self.name]
        at = min(at, len(table) - 1)
        while at >= self._kept and table[at] != NO_BLOCK:
            self.holder.give_back(request, self.name, at)
            at -= 1


def _held_tokens(group: CacheGroup, requests: int, step_tokens: int, unit: int) -> int:
    """Returns the most tokens whose blocks requests hold at any time.

    Args:
        group: the cache group.
        requests: the number of requests.
        step_tokens: the most tokens of a step, over all requests.
        unit: the number of tokens whose blocks are released together.
    """
    return requests * (group.first + group.window + 2 * unit) + step_tokens
