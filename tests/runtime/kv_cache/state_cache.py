"""A kind of cache that isn't keys and values: a recurrent state. With its row in the table, this file is all of it."""

from __future__ import annotations

from collections.abc import Sequence

from enginewright.runtime.kv_cache.kinds.base import CacheKind
from enginewright.runtime.requests.block_tables import NO_BLOCK
from enginewright.runtime.requests.request import Request
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps

SNAPSHOT_TOKENS = 16
"""Tokens between two states that are kept for other requests, if a block is free."""


class StateCache(CacheKind):
    """One block holds the state of a whole request, which has K tokens at most.

    ::

        table:  | state |                   between two steps
                | state | snapshot |        for others, at a multiple of SNAPSHOT_TOKENS; copied by the next step
                | state | state before |    while a step has drafts

    A state can't be taken apart: a request resumes only after a prefix whose state was kept, and a branch copies it.
    """

    may_lose = True
    found_as = "copies"

    @classmethod
    def takes(cls, group: CacheGroup, caps: ExecutorCaps) -> bool:
        """Takes groups of the kind "state"."""
        return group.kind == "state"

    @classmethod
    def bytes_of(cls, group: CacheGroup) -> int:
        """The bytes of a state: f32 [heads, key size, value size] in each layer."""
        return 4 * group.kv_heads * group.key_head_size * group.value_head_size * len(group.layers)

    @classmethod
    def enough_tokens(cls, group: CacheGroup, requests: int, step_tokens: int, split_tokens: int) -> int:
        """The tokens for all requests: each has a state, and the one before its drafts."""
        return 2 * requests * group.block_size

    def tokens_in(self, blocks: int) -> int:
        """The tokens that fit into blocks: ``size`` as soon as there is a state."""
        return self.size if blocks else 0

    def room(self, tokens: int, sequences: int) -> int:
        """The tokens that still fit, if there is a state for each new sequence."""
        return min(tokens, self.size) if self.pool.certain(sequences)[0] >= sequences else 0

    def usable_prefix(self, blocks: Sequence[int], tokens: int, size: int) -> int:
        """The longest prefix whose end has a snapshot."""
        return next((end for end in range(tokens // size * size, 0, -size) if blocks[end // size - 1] != NO_BLOCK), 0)

    def begin(self, request: Request, blocks: Sequence[int], tokens: int) -> int:
        """Begins without blocks; returns the snapshot to copy, if there is one."""
        request.tables.put(self.name, ())
        return blocks[-1] if tokens else NO_BLOCK

    def indexed(self, request: Request, at: int, tokens: int) -> int:
        """The snapshot to index at a multiple of SNAPSHOT_TOKENS, of which the request keeps a copy."""
        if tokens != request.computed or tokens % SNAPSHOT_TOKENS or not self._add_copy(request):
            return NO_BLOCK
        return request.tables[self.name][-1]

    def after_step(self, request: Request) -> None:
        """Releases all but the first block: a snapshot belongs to the index now, and drafts aren't rolled back any
        more.
        """
        for block in request.tables[self.name][1:]:
            self.pool.release(block)
        request.tables.cut(self.name, 1)

    def before_drafts(self, request: Request) -> bool:
        """Copies the state, so that drafts can be rolled back."""
        return self._add_copy(request)

    def rollback(self, request: Request, start: int, tokens: int) -> int:
        """Goes back to the state before the drafts; accepted tokens are computed again from there."""
        request.tables.put(self.name, list(request.tables[self.name])[::-1])
        return start

    def _add_copy(self, request: Request) -> bool:
        """Copies the state before the next step changes it; returns False if there is no block for it."""
        if not self.pool.available(request.tenant):
            return False
        self.holder.copy_block(request, self.name, request.tables[self.name][0])
        return True
