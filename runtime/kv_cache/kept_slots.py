"""What slots keep: the tokens of the request that sat there last, for executors whose blocks are slots.

A request takes the free slot that shares the longest beginning with it, and computes the rest. What it doesn't share is
overwritten, so a slot is of use to one request at a time, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from enginewright.runtime.requests.request import Request

from .block_pool import BlockPool
from .prefix_index import Namespace

LEAST_SHARE = 0.5
"""The least share of what a slot keeps, or a request has: one that shares less of both leaves the slot to others."""


@dataclass(frozen=True)
class _Kept:
    namespace: Namespace
    tokens: list[int]


class KeptSlots:
    """See the module. ``pools``: of the cache groups; a slot is the same block in all."""

    def __init__(self, pools: Mapping[str, BlockPool]) -> None:
        self._pools = pools
        self._kept: dict[int, _Kept] = {}  # slot -> what lies in it, of slots that nobody holds

    def take(self, request: Request) -> bool:
        """Has a request begin in the slot that shares most with it: sets its tables and ``computed``. False if none
        does."""
        slot, tokens = self._best(request)
        if slot is None:
            return False
        del self._kept[slot]
        for name, pool in self._pools.items():
            pool.share(slot)
            request.tables.put(name, [slot])
        request.computed = tokens
        return True

    def keep(self, request: Request) -> None:
        """What a request has computed stays in its slot, which it is about to release."""
        table = next(iter(request.tables.values()), None)
        if table and request.computed and request.error is None:
            self._kept[table[0]] = _Kept(request.namespace, request.tokens[: request.computed])
            for pool in self._pools.values():
                pool.keep(table[0], request.tenant)

    def forget(self, namespace: Namespace | None) -> None:
        """Nothing of a namespace, or of any, is found any more."""
        for slot, kept in list(self._kept.items()):
            if namespace in (None, kept.namespace):
                del self._kept[slot]
                for pool in self._pools.values():
                    pool.drop(slot)

    def evicted(self, slot: int) -> None:
        """A slot gets other tokens."""
        self._kept.pop(slot, None)

    def _best(self, request: Request) -> tuple[int | None, int]:
        """The slot that shares most with a request, and how many tokens; the last token is always computed."""
        best, most = None, 0
        for slot, kept in self._kept.items():
            if kept.namespace == request.namespace:
                common = _common(kept.tokens, request.tokens[:-1])
                if common > most and common >= LEAST_SHARE * min(len(kept.tokens), len(request.tokens)):
                    best, most = slot, common
        return best, most


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with: found by halves, as lists are compared faster than elements."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
