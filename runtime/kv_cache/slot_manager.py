"""The cache of executors with slots: a slot keeps the tokens of the request that sat there last.

A request takes the free slot that shares the longest beginning with it, and computes the rest. What it doesn't share is
overwritten, so a slot is of use to one request at a time, and nothing is copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from enginewright.runtime.requests.request import Request

from .cache_manager import CacheManager
from .prefix_index import Namespace

LEAST_SHARE = 0.5
"""Of what a slot keeps, or of what a request has: one that shares less of both leaves the slot to others."""


@dataclass(frozen=True)
class _Kept:
    namespace: Namespace
    tokens: list[int]


class SlotManager(CacheManager):
    """See the module, and ``CacheManager``; a block is a slot here, the same in all groups."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.keeps = True
        self._kept: dict[int, _Kept] = {}  # slot -> what lies in it, of slots that nobody holds

    def begin(self, request: Request, others: Iterable[Request], promised: Mapping[str, int], *, force: bool) -> bool:
        """See ``CacheManager.begin``."""
        if not self._has_blocks_for(request, promised, force):
            return False
        slot, tokens = (None, 0) if request.wants_prompt else self._best(request)
        if slot is not None:
            del self._kept[slot]
            for name, pool in self.pools.items():
                pool.share(slot)
                request.tables[name] = array("i", [slot])
            request.capacity = min(group.block_size for group in self.groups.values())
        request.computed = tokens
        self._count(request)
        return True

    def release(self, request: Request, *, partly: bool = True) -> None:
        """See ``CacheManager.release``."""
        table = next(iter(request.tables.values()), None)
        if table and request.computed and request.error is None:
            self._kept[table[0]] = _Kept(request.namespace, request.tokens[: request.computed])
            for pool in self.pools.values():
                pool.keep(table[0], request.tenant)
        super().release(request, partly=partly)

    def forget(self, namespace: Namespace | None) -> int:
        """See ``CacheManager.forget``."""
        for slot, kept in list(self._kept.items()):
            if namespace in (None, kept.namespace):
                del self._kept[slot]
                for pool in self.pools.values():
                    pool.drop(slot)
        return 0

    def _best(self, request: Request) -> tuple[int | None, int]:
        """The slot that shares most with a request, and how many tokens; the last token is always computed."""
        best, most = None, 0
        for slot, kept in self._kept.items():
            if kept.namespace == request.namespace:
                common = _common(kept.tokens, request.tokens[:-1])
                if common > most and common >= LEAST_SHARE * min(len(kept.tokens), len(request.tokens)):
                    best, most = slot, common
        return best, most

    def _evicted(self, group: int, block: int) -> None:
        self._kept.pop(block, None)


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
