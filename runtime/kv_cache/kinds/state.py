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
                | state | state before |    while a step has drafts: the state after the last known token

    A state can't be cut at an earlier token: a request resumes only after a prefix that has a snapshot, and a branch
    copies the state. The kernels store a snapshot while they compute (``StepInput.slots``); ``IndexedPrefixes`` says
    after which tokens.
    """

    may_lose = True
    found_as = "copies"
    fixed = True

    @classmethod
    def takes(cls, group: CacheGroup, caps: ExecutorCaps) -> bool:
        """Implements ``CacheKind``: True for groups of recurrent states."""
        return group.kind == STATE

    @classmethod
    def bytes_of(cls, group: CacheGroup) -> int:
        """Implements ``CacheKind``: the bytes of one state, which is 32-bit floats."""
        return 4 * group.state_size * len(group.layers)

    @classmethod
    def enough_tokens(cls, group: CacheGroup, requests: int, step_tokens: int, split_tokens: int) -> int:
        """Implements ``CacheKind``.

        Each request has a state. ``pool_plan`` adds the blocks for snapshots, which states before drafts take too.
        """
        return requests * group.block_size

    def tokens_in(self, blocks: int) -> int:
        """Implements ``CacheKind``: one block has room for the longest request."""
        return self.size if blocks else 0

    def room(self, tokens: int, sequences: int) -> int:
        """Implements ``CacheKind``: ``tokens``, if the pool has a state for each sequence; otherwise 0."""
        return min(tokens, self.size) if self.pool.certain(sequences)[0] >= sequences else 0

    def begin(self, request: Request, blocks: Sequence[int], tokens: int) -> int:
        """Implements ``CacheKind``. The request copies the snapshot, which is the last of ``blocks``."""
        request.tables.put(self.name, ())
        return blocks[-1] if tokens else NO_BLOCK

    def indexed(self, request: Request, at: int) -> int:
        """Implements ``CacheKind``: NO_BLOCK, as a node of the prefix index has snapshots instead."""
        return NO_BLOCK

    def after_step(self, request: Request) -> None:
        """Implements ``CacheKind``.

        Releases the block with the state before the last drafts, which aren't rejected any more.
        """
        if len(before := request.tables[self.name][1:]):  # a cut has the rows of the next step read again
            for block in before:
                self.pool.release(block)
            request.tables.cut(self.name, 1)

    def before_drafts(self, request: Request) -> bool:
        """Implements ``CacheKind``. Takes a block for the state before the drafts, if one is free."""
        if len(request.tables[self.name]) > 1:  # of a step that was given up
            return True
        if not self.pool.available(request.tenant):
            return False
        request.tables.extend(self.name, [self.holder.allocate(request, self.name)])
        return True

    def rollback(self, request: Request, known: int, tokens: int) -> int:
        """Implements ``CacheKind``. Returns to the state before the drafts; accepted tokens are computed again."""
        request.tables.put(self.name, list(request.tables[self.name])[::-1])
        return known
