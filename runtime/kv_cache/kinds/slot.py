"""Slots: one block holds a whole request."""

from __future__ import annotations

from collections.abc import Sequence

from enginewright.runtime.requests.block_tables import NO_BLOCK
from enginewright.runtime.requests.request import Request

from ...shared.contracts import CacheGroup, ExecutorCaps
from .paged import PagedCache


class SlotCache(PagedCache):
    """A request's only block is a slot, the same one in every group, with room for the longest request.

    ::

        slot:  | 0 1 ... computed-1 |  free places, or those of the request before |

    A slot is of use to one request at a time: a request goes on in it after the tokens that both begin with, and writes
    over the others. Nothing is shared or copied. ``KeptSlots`` says what lies in which slot.
    """

    found_as = "slots"

    @classmethod
    def takes(cls, group: CacheGroup, caps: ExecutorCaps) -> bool:
        """Implements ``CacheKind``."""
        return caps.kept_slots and super().takes(group, caps)

    def begin(self, request: Request, blocks: Sequence[int], tokens: int) -> int:
        """Implements ``CacheKind``. ``blocks`` is the slot alone."""
        for slot in blocks:
            self.pool.share(slot)
        request.tables.put(self.name, blocks)
        return NO_BLOCK
