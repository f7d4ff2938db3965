"""The kinds of cache that there are, and which of them a cache group is."""

from __future__ import annotations

from ...shared.contracts import CacheGroup, ExecutorCaps
from ...shared.errors import BundleError
from .base import CacheKind
from .paged import PagedCache
from .slot import SlotCache
from .state import StateCache
from .window import WindowCache

KINDS: list[type[CacheKind]] = [
    StateCache,
    SlotCache,
    WindowCache,
    PagedCache,
]
"""The first that takes a group is its kind."""

_SHARED = ExecutorCaps(shared_blocks=True)


def kind_of(group: CacheGroup, caps: ExecutorCaps = _SHARED) -> type[CacheKind]:
    """Returns the kind of a cache group on an executor with these capabilities.

    Raises BundleError if no kind takes the group.
    """
    for kind in KINDS:
        if kind.takes(group, caps):
            return kind
    raise BundleError(
        f"cache group {group.name!r}: kind {group.kind!r} isn't a kind of cache that is known here",
        hint="Export the bundle again, or open it with the version that exported it.",
    )


def cache_block_bytes(group: CacheGroup) -> int:
    """Returns the bytes of one block over all layers of a cache group. Raises what ``kind_of`` raises."""
    return kind_of(group).bytes_of(group)
