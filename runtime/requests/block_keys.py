"""Keys of blocks in the prefix cache: the items that were computed, in the namespace of their request.

An item is a token id, or a placeholder with the digest of the content that takes its place (an image's rows, say). Two
prefixes are the same only where all of their items are equal, so equal placeholders of different contents are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Content(NamedTuple):
    """A placeholder's token id and the digest of what takes its place. It sorts after the bare token id."""

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
    """Requests of the same one may find what each other has computed.

    Attributes:
        tenant: the tenant's name.
        adapter: the digest of the adapter that the request runs with; "" for none.
    """

    tenant: str
    adapter: str = ""


def items_of(tokens: Sequence[int], contents: Mapping[int, bytes]) -> list[Item]:
    """Returns the items of tokens, of which those at the positions of ``contents`` are placeholders."""
    items: list[Item] = list(tokens)
    for position, digest in contents.items():
        items[position] = Content(tokens[position], digest)
    return items


def token_ids(items: Sequence[Item]) -> list[int]:
    """Returns the token ids of items, a placeholder's for a content."""
    return [item.placeholder if isinstance(item, Content) else item for item in items]


def to_bytes(items: Sequence[Item]) -> list[bytes]:
    """Returns parts that no other items have: the token ids (i32), then position (i32) and digest of each content."""
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
