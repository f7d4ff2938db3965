"""The kind of cache with keys and values in blocks of K tokens, all of which a request holds until its end."""

from __future__ import annotations

from ...shared.contracts import CacheGroup, ExecutorCaps
from .base import CacheKind


class PagedCache(CacheKind):
    """The cache of layers with full attention, and of a sliding window on an executor that needs tables without holes.

    ::

        block 0            block 1            block 2
        | 0 1 ... K-1 |    | K ... 2K-1 |     | 2K ... computed-1 |  free places |

    Every step reads all blocks, so none is released before the request's end. A prefix is found by its tokens, and a
    partly used block is copied. Keys after the last token are never read, so rejected drafts needn't be removed.

    With an adaptive context each block also has a summary of its keys, by which layers choose the blocks to read. The
    summaries stay in memory when blocks are moved to a disk::

        block:   keys [K, D] | center and spread of each channel of the keys     values [K, D]
                 may wait on a disk | stays in memory                            may wait on a disk
    """

    @classmethod
    def takes(cls, group: CacheGroup, caps: ExecutorCaps) -> bool:
        """Implements ``CacheKind``: True for groups of keys and values."""
        return not group.kind

    @classmethod
    def bytes_of(cls, group: CacheGroup) -> int:
        """Implements ``CacheKind``: the bytes of keys, values and their scales."""
        return sum(plane.token_bytes for plane in group.planes) * group.block_size * len(group.layers)

    @classmethod
    def movable_bytes(cls, group: CacheGroup, layers: int) -> int:
        """Implements ``CacheKind``: the bytes of keys and values, without the summaries."""
        return sum(plane.heads * plane.head_bytes for plane in group.planes) * group.block_size * layers
