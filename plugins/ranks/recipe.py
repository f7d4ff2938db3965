"""Checks the names of partitions in recipes."""

from __future__ import annotations

from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.shared.errors import RequestError


def known_partitions(value: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of partitions unchanged. Raises ValueError for a text that isn't a partition."""
    for text in value:
        try:
            Partition.parse(text)
        except RequestError as e:
            raise ValueError(f"{e.message}. {e.hint}") from e
    return value
