from __future__ import annotations

import pytest

from enginewright.optimizer.report.charts import NARROW, WIDE, Size
from enginewright.optimizer.report.roofline import Roofline, ShapeCosts, StepTime
from enginewright.optimizer.report.roofline_view import RooflineChart, chart, shape_view, short_name, time_bars
from enginewright.plugins.cpu.compile.machine import Machine
from enginewright.runtime.shared.step_costs import StepCost

MACHINE = Machine("avx2", 2, bandwidth=1e9, peaks={"f32": 1e10, "i8": 4e10})


def shape(seconds: float | None) -> ShapeCosts:
    """Two layers of a linear that memory bounds, one that products bound, and norms that nothing here does."""
    steps = [
        StepTime("linear", f"m.layers.{i}.mlp", StepCost(weights=10**6, products={"f32": 10**6}), seconds)
        for i in range(2)
    ]
    steps.append(StepTime("linear", "head", StepCost(weights=10**3, products={"i8": 10**9}), seconds))
    steps.append(StepTime("rms_norm", "m.layers.0.norm", StepCost(activations_read=100), seconds))
    whole = None if seconds is None else 4 * seconds
    return ShapeCosts("decode", 1, 1, 64, 3, whole, None, steps)


def test_steps_of_one_kind_come_together() -> None:
    view = shape_view(shape(0.05), MACHINE)
    assert next((g.op, g.kind, g.count) for g in view.groups) == ("linear", "mlp", 2)
    groups = {g.kind: g for g in view.groups}
    assert groups["mlp"].seconds == pytest.approx(0.1)
    assert groups["mlp"].limit == pytest.approx(2e-3)
    assert groups["mlp"].share == pytest.approx(0.02)
    assert groups["mlp"].part == pytest.approx(0.5)
    assert (groups["mlp"].bound, groups["head"].bound, groups["norm"].bound) == ("memory", "products", "")
    assert groups["norm"].share is None
    assert view.limit == pytest.approx(2e-3 + 0.025)
    assert view.tokens_per_second == pytest.approx(5)
    assert view.share == pytest.approx(0.027 / 0.2)


def test_without_a_measurement_there_are_bytes_alone() -> None:
    view = shape_view(shape(None), None)
    assert (view.limit, view.share, view.tokens_per_second) == (None, None, None)
    assert all(g.seconds is None and g.limit is None and g.share is None for g in view.groups)
    assert next(g.kind for g in view.groups) == "mlp"  # most bytes
    assert chart(Roofline("cpu", None, None, [shape(None)]), [view]) is None


@pytest.mark.parametrize("size", [WIDE, NARROW])
@pytest.mark.parametrize("seconds", [1e-5, 10.0])
def test_the_chart(seconds: float, size: Size) -> None:
    timed = Roofline("cpu", "report", MACHINE, [shape(seconds), shape(seconds * 2)])
    views = [shape_view(s, MACHINE) for s in timed.shapes]
    drawn = chart(timed, views, size)
    assert drawn is not None
    assert len(drawn.points) == 4  # two kinds with products in two shapes
    assert {p.series for p in drawn.points} == {0, 1}
    assert all(0 <= p.x <= size.width and 0 <= p.y <= size.height for p in drawn.points)
    assert [line.label for line in drawn.lines] == ["memory: 1 GB/s", "f32: 10 G/s", "i8: 40 G/s"]
    slope, f32, i8 = drawn.lines
    assert slope.x1 < slope.x2 and slope.y1 > slope.y2 and slope.angle < 0
    assert f32.y1 == f32.y2 > i8.y1 == i8.y2
    assert i8.x1 == pytest.approx(slope.x2, abs=0.1)  # the roof has no gap
    assert all("…" not in label for *_, label in drawn.labels)
    # No line goes through a name, whose letters are some 10 high above its baseline.
    assert not any(y - 11 < line.y1 < y + 3 for _, y, _, _ in drawn.labels for line in (f32, i8))


def boxes(found: RooflineChart) -> list[tuple[float, float, float, float]]:
    """Gives the boxes of all names: those of points, and of the roofs."""
    texts = [*found.labels, *((r.label_x, r.label_y, r.anchor, r.label) for r in found.lines[1:])]
    return [
        (left := x - 6.6 * len(text) if anchor == "end" else x, y - 11, left + 6.6 * len(text), y + 3)
        for x, y, anchor, text in texts
    ]


@pytest.mark.parametrize("peaks", [{"f32": 1e10, "i8": 4e10}, {"f32": 1.00e10, "bf16": 1.02e10, "i8": 1.04e10}])
@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_no_name_covers_another_or_a_point(peaks: dict[str, float], size: Size) -> None:
    """Points that crowd at one place, and roofs that nearly fall together."""
    machine = Machine("avx2", 2, bandwidth=1e9, peaks=peaks)
    steps = [
        StepTime(
            "linear", f"layers.0.{name}_proj", StepCost(weights=10**6, products={"f32": n * 10**6}), 1e-3 * (1 + i / 9)
        )
        for i, (name, n) in enumerate([("q", 1), ("gate", 1), ("up", 1), ("down", 1), ("head", 8), ("k", 9), ("v", 9)])
    ]
    crowded = ShapeCosts("decode", 1, 1, 64, 3, 8e-3, None, steps)
    drawn = chart(Roofline("cpu", "report", machine, [crowded]), [shape_view(crowded, machine)], size)
    assert drawn is not None
    assert len(drawn.labels) > 2
    names = boxes(drawn)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert not (a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]), (a, b)
    for left, top, right, bottom in names[: len(drawn.labels)]:
        assert left >= 0 and right <= size.width and top >= 0 and bottom <= size.height
        assert not any(left < p.x < right and top < p.y < bottom for p in drawn.points)


def test_no_part_of_the_chart_is_empty() -> None:
    """The highest roof is near its top, and the lowest point near its bottom."""
    timed = Roofline("cpu", "report", MACHINE, [shape(0.05)])
    drawn = chart(timed, [shape_view(s, MACHINE) for s in timed.shapes])
    assert drawn is not None
    height = drawn.bottom - drawn.top
    assert min(line.y2 for line in drawn.lines) < drawn.top + height / 4
    assert max(p.y for p in drawn.points) > drawn.bottom - height / 4


def test_where_a_step_s_time_goes() -> None:
    timed = [shape_view(shape(0.05), MACHINE), shape_view(shape(None), MACHINE)]
    bars = time_bars(timed, 400.0)
    assert bars is not None
    assert [bar.name for bar in bars.bars] == ["decode"]  # the other wasn't timed
    assert bars.kinds == ("mlp", "head", "norm")
    (bar,) = bars.bars
    assert [s.width for s in bar.slices] == pytest.approx([200.0, 100.0, 100.0])
    assert [s.text for s in bar.slices] == ["mlp 50 %", "head 25 %", "norm 25 %"]
    assert bar.y + bars.bar <= bars.size.height
    narrow = time_bars(timed, 60.0)
    assert narrow is not None and [s.text for s in narrow.bars[0].slices] == ["", "", ""]
    assert time_bars(timed[1:], 400.0) is None


def test_names_in_a_chart_are_short() -> None:
    assert short_name("self_attn.q_proj+k_proj+v_proj") == "q+k+v"
    assert short_name("mlp.down_proj + input_layernorm") == "down+input_norm"
    assert short_name("lm_head") == "lm_head"
