"""The kind of cache for states of recurrent layers: one block holds a layer's whole knowledge of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

from enginewright.runtime.requests.block_tables import NO_BLOCK
from enginewright.runtime.requests.request import Request

from ...shared.contracts import STATE, CacheGroup, ExecutorCaps
from .base import CacheKind


class StateCache(CacheKind):
    """The cache of recurrent states.

    A state has the same size after any number of tokens, and every step overwrites it.

    ::

        table:  | state |                   between two steps
                | state | snapshot |        for other requests; the next step makes the copy, then changes the state
                | state | state before |    while a step has drafts

    A state can't be cut at an earlier token: a request resumes only after a prefix that has a snapshot, and a branch
    copies the state. A snapshot is made when a step ends at the end of a block of the prefix index, if a block is free.
    """

    may_lose = True
    found_as = "copies"
    fixed = True

    @classmethod
    def takes(cls, group: CacheGroup, caps: ExecutorCaps) -> bool:
        """Implements ``CacheKind``."""
        return group.kind == STATE

    @classmethod
    def bytes_of(cls, group: CacheGroup) -> int:
        """Implements ``CacheKind``."""
        return 4 * group.state_size * len(group.layers)

    @classmethod
    def enough_tokens(cls, group: CacheGroup, requests: int, step_tokens: int, split_tokens: int) -> int:
        """Implements ``CacheKind``.

        Each request has a state, and a second block for a snapshot or the state before drafts.
        """
        return 2 * requests * group.block_size

    def tokens_in(self, blocks: int) -> int:
        """Implements ``CacheKind``."""
        return self.size if blocks else 0

    def room(self, tokens: int, sequences: int) -> int:
        """Implements ``CacheKind``."""
        return min(tokens, self.size) if self.pool.certain(sequences)[0] >= sequences else 0

    def usable_prefix(self, blocks: Sequence[int], tokens: int, size: int) -> int:
        """Implements ``CacheKind``: the longest prefix whose end has a snapshot."""
        return next((end for end in range(tokens // size * size, 0, -size) if blocks[end // size - 1] != NO_BLOCK), 0)

    def begin(self, request: Request, blocks: Sequence[int], tokens: int) -> int:
        """Implements ``CacheKind``."""
        request.tables.put(self.name, ())
        return blocks[-1] if tokens else NO_BLOCK

    def indexed(self, request: Request, at: int, tokens: int, full: bool) -> int:
        """Implements ``CacheKind``.

        Makes a snapshot if the state is the one after ``tokens`` tokens and a block is free.
        """
        if not full or tokens != request.computed or not self._add_copy(request):
            return NO_BLOCK
        return request.tables[self.name][-1]

    def after_step(self, request: Request) -> None:
        """Implements ``CacheKind``.

        Releases the second block: the index holds a snapshot now, and no draft can be rejected.
        """
        for block in request.tables[self.name][1:]:
            self.pool.release(block)
        request.tables.cut(self.name, 1)

    def before_drafts(self, request: Request) -> bool:
        """Implements ``CacheKind``."""
        return self._add_copy(request)

    def rollback(self, request: Request, start: int, tokens: int) -> int:
        """Implements ``CacheKind``. Returns to the state before the drafts; accepted tokens are computed again."""
        request.tables.put(self.name, list(request.tables[self.name])[::-1])
        return start

    def _add_copy(self, request: Request) -> bool:
        """Has the next step copy the state before it changes the state. Returns False if no block is free for it."""
        if not self.pool.available(request.tenant):
            return False
        self.holder.copy_block(request, self.name, request.tables[self.name][0])
        return True
