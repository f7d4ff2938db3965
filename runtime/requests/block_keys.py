"""Keys of blocks in the prefix cache: the items that were computed, and the namespace of the request.

An item is a token id, or a placeholder token with the digest of the content that replaces it (such as rows of an
image). Two prefixes are the same only if all their items are equal, so that placeholders of different contents differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Content(NamedTuple):
    """A placeholder's token id, with the digest of the content that replaces it. It sorts after the plain token id."""

    placeholder: int
    digest: bytes

    def __lt__(self, other: object) -> bool:
        return _ordered(self) < _ordered(other)

    def __gt__(self, other: object) -> bool:
        return _ordered(self) > _ordered(other)

    def __le__(self, other: object) -> bool:
        return _ordered(self) <= _ordered(other)

    def __ge__(self, other: object) -> bool:
        return _ordered(self) >= _ordered(other)


Item = int | Content


class Namespace(NamedTuple):
    """The scope of a request's prefixes: requests of the same namespace can share computed blocks.

    Attributes:
        tenant: the tenant's name.
        adapter: the digest of the adapter that the request runs with; "" for none.
    """

    tenant: str
    adapter: str = ""


def items_of(tokens: Sequence[int], contents: Mapping[int, bytes]) -> list[Item]:
    """Returns the item of each token: its id; or a ``Content``, if ``contents`` has a digest for its position."""
    items: list[Item] = list(tokens)
    for position, digest in contents.items():
        items[position] = Content(tokens[position], digest)
    return items


def token_ids(items: Sequence[Item]) -> list[int]:
    """Returns the token ids of items; for a content, the placeholder's id."""
    return [item.placeholder if isinstance(item, Content) else item for item in items]


def to_bytes(items: Sequence[Item]) -> list[bytes]:
    """Returns bytes that identify the items: first all token ids (i32), then position (i32) and digest of each
    content.
    """
    parts = [np.asarray(token_ids(items), "<i4").tobytes()]
    for at, item in enumerate(items):
        if isinstance(item, Content):
            parts += [at.to_bytes(4, "little"), item.digest]
    return parts


def _ordered(item: object) -> tuple[int, bytes]:
    if isinstance(item, Content):
        return item.placeholder, b"\0" + item.digest
    if isinstance(item, int):
        return item, b""
    raise TypeError(f"{item!r} isn't an item of a block's key")


def common_items(one: Sequence[Item], other: Sequence[Item]) -> int:
    """Returns the number of equal items at the beginning of two lists, or of two tuples.

    A binary search, because slices are compared faster than items one by one.
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
