from __future__ import annotations

import pytest

from enginewright.optimizer.bench.result import Spread


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([3.0], (3, 3, 3, 3, 3, 1)),
        ([2.0, 1.0], (1.5, 1, 2, 1, 2, 2)),
        ([5.0, 1.0, 4.0, 2.0, 3.0], (3, 2, 4, 1, 5, 5)),
    ],
)
def test_a_spread(values: list[float], wanted: tuple[float, ...]) -> None:
    s = Spread.from_values(values)
    assert (s.median, s.low, s.high, s.least, s.most, s.count) == wanted


def test_of_nothing() -> None:
    with pytest.raises(ValueError, match="nothing to take a median of"):
        Spread.from_values([])
