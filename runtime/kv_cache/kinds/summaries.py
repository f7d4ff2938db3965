"""Keys and values in blocks, each with a summary of its keys, by which layers choose the blocks that they look at."""

from __future__ import annotations

from ...shared.contracts import CacheGroup, ExecutorCaps
from .paged import PagedCache


class SummariesCache(PagedCache):
    """An adaptive context: blocks live as in ``PagedCache``.

    ::

        block:   keys [K, D] | center and spread of each channel of the keys     values [K, D]
                 may wait on a disk | stays in memory                            may wait on a disk

    A summary says what a query may score on a block, so that a block is chosen before it is read. Where blocks wait on
    a disk, the summaries of all blocks stay in memory.
    """

    @classmethod
    def takes(cls, group: CacheGroup, caps: ExecutorCaps) -> bool:
        """Implements ``CacheKind``."""
        return group.summaries and super().takes(group, caps)

    @classmethod
    def movable_bytes(cls, group: CacheGroup, layers: int) -> int:
        """Implements ``CacheKind``."""
        return super().movable_bytes(group, layers) - cls.summary_bytes(group) * layers

    @staticmethod
    def summary_bytes(group: CacheGroup) -> int:
        """Returns the bytes of the summaries of one block in one layer."""
        return sum(plane.heads * plane.summary_bytes for plane in group.planes) * group.block_size
