"""What recipes say of ranks."""

from __future__ import annotations

from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.shared.errors import RequestError


def known_partitions(value: tuple[str, ...]) -> tuple[str, ...]:
    """The same. Raises ValueError for one that isn't a partition."""
    for text in value:
        try:
            Partition.parse(text)
        except RequestError as e:
            raise ValueError(f"{e.message}. {e.hint}") from e
    return value
