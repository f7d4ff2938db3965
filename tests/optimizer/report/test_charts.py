from __future__ import annotations

import itertools

import pytest

from enginewright.optimizer.report.charts import LogAxis, stacked, treemap


def test_a_log_axis() -> None:
    axis = LogAxis.around([0.3, 42.0], 100.0, 400.0)
    assert (axis.low, axis.high) == (0.1, 100.0)
    assert axis.ticks() == pytest.approx([0.1, 1.0, 10.0, 100.0])
    assert [axis.at(v) for v in (0.1, 1.0, 100.0)] == [100.0, 200.0, 400.0]
    assert (axis.at(1e-9), axis.at(1e9)) == (100.0, 400.0)


def test_a_log_axis_upside_down_and_of_one_value() -> None:
    axis = LogAxis.around([10.0, 10.0], 300.0, 0.0)
    assert (axis.low, axis.high) == (10.0, 100.0)
    assert (axis.at(10.0), axis.at(100.0)) == (300.0, 0.0)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.02, 300.0], [0.1, 1.0, 10.0, 100.0]),
        ([4.0, 70.0], [3.0, 10.0, 30.0, 100.0]),
        ([3.0, 3.0], [2.0, 3.0, 4.0]),
    ],
)
def test_an_axis_that_ends_near_its_values_has_three_ticks(values: list[float], ticks: list[float]) -> None:
    axis = LogAxis.near(values, 0.0, 100.0, margin=1.5)
    assert axis.more_ticks() == pytest.approx(ticks)
    assert axis.at(values[0]) - 0 == pytest.approx(100 - axis.at(values[-1]), abs=0.02)


@pytest.mark.parametrize("sizes", [[1], [6, 6, 4, 3, 2, 2, 1], [1000, 1, 1], [5.0] * 9])
@pytest.mark.parametrize("box", [(0.0, 0.0, 60.0, 40.0), (5.0, 7.0, 30.0, 300.0)])
def test_a_treemap_fills_its_box(sizes: list[float], box: tuple[float, float, float, float]) -> None:
    boxes = treemap(sizes, box)
    x, y, width, height = box
    areas = [w * h for *_, w, h in boxes]
    assert areas == pytest.approx([size * width * height / sum(sizes) for size in sizes])
    for a, b, w, h in boxes:
        assert x - 1e-6 <= a and a + w <= x + width + 1e-6
        assert y - 1e-6 <= b and b + h <= y + height + 1e-6
    for (a, b, w, h), (c, d, u, v) in itertools.combinations(boxes, 2):
        assert min(a + w, c + u) - max(a, c) < 1e-6 or min(b + h, d + v) - max(b, d) < 1e-6


def test_a_treemap_s_rectangles_are_near_to_squares() -> None:
    """The example of its paper, whose slices would be as thin as 1 to 16."""
    boxes = treemap([6, 6, 4, 3, 2, 2, 1], (0.0, 0.0, 6.0, 4.0))
    assert max(max(w / h, h / w) for *_, w, h in boxes) < 3


def test_no_sizes_no_treemap() -> None:
    assert treemap([], (0.0, 0.0, 6.0, 4.0)) == []


def test_a_stacked_bar() -> None:
    assert stacked([1, 3], 100.0) == [(0.0, 25.0), (25.0, 75.0)]
    assert stacked([1, 3], 100.0, total=8) == [(0.0, 12.5), (12.5, 37.5)]
    assert stacked([0], 100.0) == [(0.0, 0.0)]
