"""The kind of cache in which one block, a slot, holds a whole request."""

from __future__ import annotations

from collections.abc import Sequence

from enginewright.runtime.requests.block_tables import NO_BLOCK
from enginewright.runtime.requests.request import Request

from ...shared.contracts import CacheGroup, ExecutorCaps
from .paged import PagedCache


class SlotCache(PagedCache):
    """The cache of a request that has one block, a slot, with room for the longest request.

    ::

        slot:  | 0 1 ... computed-1 |  free places, or tokens of the previous request |

    A request has the same slot in every group. The next request in a slot keeps the tokens that both begin with, and
    overwrites the others. Nothing is shared or copied. `KeptSlots` has the tokens of each slot.
    """

    found_as = "slots"

    @classmethod
    def takes(cls, group: CacheGroup, caps: ExecutorCaps) -> bool:
        """Implements ``CacheKind``: True if the executor's blocks are slots that keep their tokens."""
        return caps.kept_slots and super().takes(group, caps)

    def begin(self, request: Request, blocks: Sequence[int], tokens: int) -> int:
        """Implements ``CacheKind``. ``blocks`` is the slot alone."""
        for slot in blocks:
            self.pool.share(slot)
        request.tables.put(self.name, blocks)
        return NO_BLOCK
