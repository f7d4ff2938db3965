"""What is taken is evenly spread, and begins with the first."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.framework.spread import beginnings, spread


@pytest.mark.parametrize(("many", "count", "taken"), [(5, 5, [0, 1, 2, 3, 4]), (5, 2, [0, 2]), (9, 4, [0, 2, 4, 6])])
def test_spread(many: int, count: int, taken: list[int]) -> None:
    assert spread(range(many), count) == taken


@pytest.mark.parametrize(
    ("sequences", "most", "length", "sizes"),
    [(6, 64, 16, [16] * 4), (2, 64, 16, [32, 32]), (6, 10, 16, [10]), (1, 500, 16, [100]), (6, 64, 40, [64])],
)
def test_beginnings(sequences: int, most: int, length: int, sizes: list[int]) -> None:
    given = [torch.arange(100) + 1000 * i for i in range(sequences)]
    found = beginnings(given, most, length)
    assert [len(f) for f in found] == sizes
    assert all(torch.equal(f, whole[: len(f)]) for f, whole in zip(found, spread(given, len(found)), strict=True))
