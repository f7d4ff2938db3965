"""Prefixes in slots: a slot keeps the tokens of its last request, for executors whose blocks are slots.

A request takes the free slot whose tokens have the longest common beginning with its own, and computes the rest. It
overwrites the slot's other tokens. So only one request at a time uses a slot, and nothing is copied.
"""

from __future__ import annotations

import msgspec

from enginewright.runtime.requests.block_keys import Item, Namespace, common_items
from enginewright.runtime.requests.request import Request

from .candidate import Candidate
from .held_blocks import HeldBlocks
from .prefixes import Prefixes
from .tier import Tier

LEAST_SHARE = 0.5
"""The least common beginning with which a slot is reused, as a share of the shorter of the two token sequences.

The sequences are the tokens in the slot and those of the request.
"""


class _Kept(msgspec.Struct, frozen=True):
    namespace: Namespace
    items: list[Item]


class KeptSlots(Prefixes):
    """Finds prefixes in the slots of requests that have ended. A slot is one block index, used in every cache group."""

    finds = True

    def __init__(self, held: HeldBlocks) -> None:
        super().__init__(held)
        self.kept: dict[int, _Kept] = {}  # slot -> its contents, of slots that no request holds

    def begin(self, candidate: Candidate) -> bool:
        """Begins a request in the free slot with the longest common beginning; see ``CacheManager.begin``."""
        request = candidate.request
        if not self.held.has_blocks_for(candidate):
            return False
        if not request.wants_prompt:
            slot, tokens = self._best(request)
            if slot is not None:
                del self.kept[slot]
                for kind in self.held.kinds.values():
                    kind.begin(request, (slot,), tokens)
                request.computed = tokens
                self.held.set_capacity(request, 0)
        self._count(request)
        return True

    def leave(self, request: Request, *, partly: bool) -> None:
        """Implements ``Prefixes``. The tokens that a request has computed stay in its slot."""
        table = next(iter(request.tables.values()), None)
        if table and request.computed and request.error is None:
            self.kept[table[0]] = _Kept(request.namespace, list(request.items[: request.computed]))
            for pool in self.held.pools.values():
                pool.keep(table[0], request.tenant)

    def forget(self, tenant: str | None) -> None:
        """Implements ``Prefixes``: forgets the contents of the tenant's slots."""
        for slot, contents in list(self.kept.items()):
            if tenant in (None, contents.namespace.tenant):
                del self.kept[slot]
                for pool in self.held.pools.values():
                    pool.drop(slot)

    def evicted(self, group: int, block: int, tier: Tier | None) -> None:
        """Implements ``Prefixes``: forgets the slot's contents."""
        self.kept.pop(block, None)

    def _best(self, request: Request) -> tuple[int | None, int]:
        """Returns (slot, length) of the slot with the longest common beginning; (None, 0) if no slot has one.

        The request's last token isn't counted: it is always computed.
        """
        best, most = None, 0
        for slot, contents in self.kept.items():
            if contents.namespace == request.namespace:
                common = common_items(contents.items, list(request.items[:-1]))
                if common > most and common >= LEAST_SHARE * min(len(contents.items), len(request.items)):
                    best, most = slot, common
        return best, most
