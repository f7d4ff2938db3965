from __future__ import annotations

import numpy as np

from enginewright.optimizer.bisect.points import Point, Recording, leaves_of

A, B = Point("layers.0.q", "output"), Point("layers.0.k", "output")


def test_layers() -> None:
    assert (A.layer, Point("", "logits").layer) == ("layers.0", "")


def test_leaves_have_no_modules_in_them() -> None:
    assert leaves_of(["", "a", "a.b", "a.b.c", "a.bc", "d"]) == {"a.b.c", "a.bc", "d"}


def test_values_come_token_by_token() -> None:
    recording = Recording(4, {A: np.arange(8, dtype=np.float32).reshape(4, 2)})
    assert recording.see(B, np.ones((4, 3), np.float32)) is None
    given = recording.see(A, np.full((2, 2), 5, np.float32), np.array([3, 1]))
    np.testing.assert_array_equal(given, [[6, 7], [2, 3]])
    assert recording.values[A][[1, 3]].tolist() == [[5, 5], [5, 5]] and np.isnan(recording.values[A][[0, 2]]).all()


def test_a_value_of_another_width_is_not_gone_on_with() -> None:
    recording = Recording(2, {A: np.zeros((2, 3), np.float32)})
    assert recording.see(A, np.ones((2, 4), np.float32)) is None
    recording.see(A, np.ones((2, 5), np.float32))  # and one that changes its width isn't a point
    assert A not in recording.values


def test_scaled_channels_are_compared_without_their_scale() -> None:
    scale = np.array([2, 4], np.float32)
    recording = Recording(1, {A: np.array([[3, 3]], np.float32)}, {A: scale}, {B})
    given = recording.see(A, np.array([[2, 4]], np.float32))
    np.testing.assert_array_equal(recording.values[A], [[1, 1]])
    np.testing.assert_array_equal(given, [[6, 12]])
    assert recording.see(B, np.ones((1, 2), np.float32)) is None and B not in recording.values
