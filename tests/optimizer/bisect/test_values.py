from __future__ import annotations

import numpy as np
import pytest
import torch

from enginewright.optimizer.bisect.values import Recording, batch_axis, from_rows, leaves_of, to_rows, token_axis
from enginewright.passes.ir.value_name import ValueName

A, B = ValueName("layers.0.q", "output"), ValueName("layers.0.k", "output")


def test_layers() -> None:
    assert (A.layer, ValueName("", "logits").layer) == ("layers.0", "")


def test_leaves_have_no_modules_in_them() -> None:
    assert leaves_of(["", "a", "a.b", "a.b.c", "a.bc", "d"]) == {"a.b.c", "a.bc", "d"}


def test_values_come_token_by_token() -> None:
    recording = Recording(4, {A: np.arange(8, dtype=np.float32).reshape(4, 2)})
    assert recording.see(B, np.ones((4, 3), np.float32)) is None
    replacement = recording.see(A, np.full((2, 2), 5, np.float32), np.array([3, 1]))
    np.testing.assert_array_equal(replacement, [[6, 7], [2, 3]])
    assert recording.values[A][[1, 3]].tolist() == [[5, 5], [5, 5]] and np.isnan(recording.values[A][[0, 2]]).all()


def test_a_value_of_another_width_is_not_gone_on_with() -> None:
    recording = Recording(2, {A: np.zeros((2, 3), np.float32)})
    assert recording.see(A, np.ones((2, 4), np.float32)) is None
    recording.see(A, np.ones((2, 5), np.float32))  # and one that changes its width isn't compared
    assert A not in recording.values


def test_scaled_channels_are_compared_without_their_scale() -> None:
    scale = np.array([2, 4], np.float32)
    recording = Recording(1, {A: np.array([[3, 3]], np.float32)}, {A: scale}, {B})
    replacement = recording.see(A, np.array([[2, 4]], np.float32))
    np.testing.assert_array_equal(recording.values[A], [[1, 1]])
    np.testing.assert_array_equal(replacement, [[6, 12]])
    assert recording.see(B, np.ones((1, 2), np.float32)) is None and B not in recording.values


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
