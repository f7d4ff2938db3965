"""The table of the kinds of cache, and the choice of a cache group's kind."""

from __future__ import annotations

from collections.abc import Iterable

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
"""All kinds of cache. A group's kind is the first one that takes the group."""

_SHARED = ExecutorCaps(shared_blocks=True)


def kind_of(group: CacheGroup, caps: ExecutorCaps = _SHARED) -> type[CacheKind]:
    """Returns the kind of a cache group on an executor with the capabilities ``caps``.

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
    """Returns the bytes of one block over all layers of a cache group. Raises BundleError as `kind_of` does."""
    return kind_of(group).bytes_of(group)


def token_groups(groups: Iterable[CacheGroup]) -> list[CacheGroup]:
    """Returns the groups that hold the keys and values of all tokens: no states, and no second caches of ends."""
    return [group for group in groups if not kind_of(group).fixed and not group.holds_ends]


def token_bytes(groups: Iterable[CacheGroup]) -> int:
    """Returns the bytes of a token's keys and values in the groups of `token_groups`."""
    return sum(cache_block_bytes(group) // group.block_size for group in token_groups(groups))
