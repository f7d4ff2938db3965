"""Some of many, evenly spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

Item = TypeVar("Item")


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """``count`` of the items, in order: the first, and others at even distances."""
    return [items[i * len(items) // count] for i in range(count)]


def beginnings(sequences: Sequence[torch.Tensor], most: int, length: int) -> list[torch.Tensor]:
    """The beginnings of some sequences: ``most`` tokens in sequences of ``length``, of more where these are too few."""
    count = min(len(sequences), max(1, most // length))
    return [sequence[: max(1, most // count)] for sequence in spread(sequences, count)]
