from __future__ import annotations

import pytest
import torch

from enginewright.optimizer.bisect.rows import batch_axis, from_rows, to_rows, token_axis


@pytest.mark.parametrize(
    ("shape", "tokens", "axis"),
    [
        ((1, 7, 64), 7, 1),
        ((1, 1, 64), 1, 1),
        ((1, 7, 4, 16), 7, 1),
        ((1, 4, 7, 16), 7, 2),
        ((7, 64), 7, 0),
        ((1, 64), 1, 0),
        ((7, 2, 8), 7, 0),
        ((1, 5, 64), 7, None),
        ((3, 64), 7, None),
    ],
)
def test_where_a_module_s_value_has_its_tokens(shape: tuple[int, ...], tokens: int, axis: int | None) -> None:
    assert batch_axis(shape, tokens) == axis


def test_an_axis_that_cannot_be_told() -> None:
    assert token_axis(["T", 4, 16], "T") == 0
    assert token_axis([4, "T", 16], "T") == 1
    assert token_axis(["T", "T"], "T") is None and token_axis([4, 16], "T") is None


@pytest.mark.parametrize(("shape", "axis"), [((7, 6), 0), ((1, 7, 6), 1), ((2, 7, 3), 1), ((1, 2, 7, 3), 2)])
def test_rows_and_back(shape: tuple[int, ...], axis: int) -> None:
    value = torch.randn(shape)
    rows = to_rows(value, axis)
    assert rows.shape == (7, 6)
    torch.testing.assert_close(torch.from_numpy(rows[3]), value.select(axis, 3).flatten())
    torch.testing.assert_close(from_rows(rows, value, axis), value)
    value.zero_()
    assert rows.any()  # a copy
