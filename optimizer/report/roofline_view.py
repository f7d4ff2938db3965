"""A roofline as the page and the terminal show it: steps of one kind together, with their share of the limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from enginewright.optimizer.shared.storage import kind_of
from enginewright.plugins.shared.step_costs import StepCost

from .charts import LogAxis
from .machine import Machine
from .roofline import Roofline, ShapeCosts, StepTime, limit_seconds, multiply_seconds

WIDTH, HEIGHT = 760.0, 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 24.0, 16.0, 44.0
_LETTER, _LINE, _LONGEST = 6.6, 15.0, 34
_NEARBY = 40.0
"""Of one kind's names, which are then one too many."""

_Corners = tuple[float, float, float, float]
"""left, top, right, bottom"""


@dataclass(frozen=True)
class StepGroup:
    """All steps of a shape with the same op for the same modules of different layers.

    ``seconds``, ``limit`` and ``share`` (limit / seconds) are None where nothing was measured, and ``share`` where a
    step brings nothing from memory. ``bound``: "memory" or "products", whichever limits it; "" where neither does.
    """

    op: str
    kind: str
    count: int
    cost: StepCost
    seconds: float | None
    limit: float | None
    share: float | None
    part: float | None
    bound: str


@dataclass(frozen=True)
class ShapeView:
    """A shape with its groups, those that take longest first."""

    shape: ShapeCosts
    groups: tuple[StepGroup, ...]
    limit: float | None

    @property
    def tokens_per_second(self) -> float | None:
        """Of the step, without what happens between steps."""
        return self.shape.tokens / self.shape.seconds if self.shape.seconds else None

    @property
    def share(self) -> float | None:
        """Of the limit that was reached."""
        return self.limit / self.shape.seconds if self.limit is not None and self.shape.seconds else None


@dataclass(frozen=True)
class Point:
    """A group in the chart: ``series`` is its shape's place in the list."""

    x: float
    y: float
    size: float
    series: int
    title: str


@dataclass(frozen=True)
class Line:
    """A limit in the chart, and where its name is; the name of one that slopes is along it."""

    x1: float
    y1: float
    x2: float
    y2: float
    label: str
    label_x: float = 0.0
    label_y: float = 0.0
    anchor: str = "start"

    @property
    def angle(self) -> float:
        """In degrees, as a picture turns: down is positive."""
        return round(math.degrees(math.atan2(self.y2 - self.y1, self.x2 - self.x1)), 1)


@dataclass(frozen=True)
class RooflineChart:
    """Points by multiply-adds a byte and a second, under this machine's limits.

    ``labels``: x, y, text-anchor and text of the points that are named.
    """

    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    lines: tuple[Line, ...]
    points: tuple[Point, ...]
    labels: tuple[tuple[float, float, str, str], ...]
    width: float = WIDTH
    height: float = HEIGHT


def shape_view(shape: ShapeCosts, machine: Machine | None) -> ShapeView:
    """The groups of a shape."""
    found: dict[tuple[str, str], list[StepTime]] = {}
    for step in shape.steps:
        found.setdefault((step.op, kind_of(step.where)), []).append(step)
    groups = [_group(op, kind, steps, shape.seconds, machine) for (op, kind), steps in found.items()]
    groups.sort(key=lambda g: -(g.seconds if g.seconds is not None else g.cost.memory))
    limit = None if machine is None else sum(limit_seconds(s.cost, machine) for s in shape.steps)
    return ShapeView(shape, tuple(groups), limit)


def _group(op: str, kind: str, steps: Sequence[StepTime], whole: float | None, machine: Machine | None) -> StepGroup:
    cost = sum((s.cost for s in steps), StepCost())
    times = [s.seconds for s in steps if s.seconds is not None]
    seconds = sum(times) if len(times) == len(steps) else None
    limit = None if machine is None else sum(limit_seconds(s.cost, machine) for s in steps)
    share = limit / seconds if seconds and limit else None
    bound = ""
    if machine is not None and limit:
        bound = "products" if multiply_seconds(cost, machine) > cost.memory / machine.bandwidth else "memory"
    part = seconds / whole if seconds is not None and whole else None
    return StepGroup(op, kind, len(steps), cost, seconds, limit, share, part, bound)


def chart(roofline: Roofline, views: Sequence[ShapeView]) -> RooflineChart | None:
    """The chart; None if nothing was measured that has products and bytes."""
    machine = roofline.machine
    found = [
        (i, g, g.cost.multiply_adds / g.cost.memory, g.cost.multiply_adds / g.seconds)
        for i, view in enumerate(views)
        for g in view.groups
        if g.seconds and g.cost.multiply_adds and g.cost.memory
    ]
    if machine is None or not found:
        return None
    top = max(machine.peaks.values())
    ridge = top / machine.bandwidth
    x = LogAxis.around([*(x for _, _, x, _ in found), ridge * 1.01], _LEFT, WIDTH - _RIGHT)
    y = LogAxis.around([*(y for *_, y in found), top * 1.01], HEIGHT - _BOTTOM, _TOP)
    slope = _slope(machine.bandwidth, x, y, top)
    lines = [slope, *_roofs(machine, x, y, slope)]
    points = [
        Point(
            x.at(per_byte),
            y.at(per_second),
            round(3 + 9 * math.sqrt(g.part or 0), 1),
            i,
            f"{views[i].shape.name}: {g.op} {g.kind}, {per_byte:.3g} multiply-adds a byte, {per_second / 1e9:.3g} G/s",
        )
        for i, g, per_byte, per_second in found
    ]
    return RooflineChart(
        tuple((x.at(t), _power(t)) for t in x.ticks()),
        tuple((y.at(t), _power(t / 1e9)) for t in y.ticks()),
        tuple(lines),
        tuple(points),
        tuple(_labels([(p, g.kind) for p, (_, g, _, _) in zip(points, found, strict=True)], lines)),
    )


def _roofs(machine: Machine, x: LogAxis, y: LogAxis, slope: Line) -> list[Line]:
    """A line for each type of products, lowest first, each named where no other name stands."""
    taken = [_slope_label(slope)]
    found = []
    for kind, peak in sorted(machine.peaks.items(), key=lambda item: item[1]):
        start, end, height, text = x.at(peak / machine.bandwidth), x.at(x.high), y.at(peak), f"{kind} products"
        places = [(start + 24, height - 6, "start"), (end - 6, height - 6, "end")]
        places += [(start + 24, height + _LINE, "start"), (end - 6, height + _LINE, "end")]
        at = next((p for p in places if not _covers(_text_box(*p, text), taken)), places[0])
        taken.append(_text_box(*at, text))
        found.append(Line(start, height, end, height, text, *at))
    return found


def _labels(points: Sequence[tuple[Point, str]], lines: Sequence[Line]) -> list[tuple[float, float, str, str]]:
    """Names beside, below or above the largest points, where nothing else is: no name, no line, no other point.

    A kind of module that has been named at a point nearby is not named again.
    """
    slope, *roofs = lines
    taken = [_slope_label(slope), *(_text_box(r.label_x, r.label_y, r.anchor, r.label) for r in roofs)]
    taken += [(r.x1, r.y1 - 1, r.x2, r.y1 + 1) for r in roofs]
    taken += [(p.x - p.size, p.y - p.size, p.x + p.size, p.y + p.size) for p, _ in points]
    steps = [i / 100 for i in range(101)]
    taken += [
        (x - 1, y - 1, x + 1, y + 1)
        for x, y in ((slope.x1 + s * (slope.x2 - slope.x1), slope.y1 + s * (slope.y2 - slope.y1)) for s in steps)
    ]
    found: list[tuple[float, float, str, str]] = []
    for point, name in sorted(points, key=lambda item: -item[0].size):
        text = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
        away = point.size + 4
        places = [(point.x + side * away, point.y + drop) for drop in (4, away + 10, -away - 2) for side in (1, -1)]
        for at_x, at_y in places:
            anchor = "start" if at_x > point.x else "end"
            box = _text_box(at_x, at_y, anchor, text)
            inside = box[0] >= _LEFT and box[2] <= WIDTH and box[1] >= 0 and box[3] <= HEIGHT - _BOTTOM
            named = any(t == text and abs(x - at_x) < _NEARBY and abs(y - at_y) < _NEARBY for x, y, _, t in found)
            if inside and not named and not _covers(box, taken):
                taken.append(box)
                found.append((round(at_x, 1), round(at_y, 1), anchor, text))
                break
    return found


def _text_box(x: float, y: float, anchor: str, text: str) -> _Corners:
    """Where a text is: its letters are some 10 high above the baseline, and some reach 3 below."""
    left = x - _LETTER * len(text) if anchor == "end" else x
    return left, y - 11, left + _LETTER * len(text), y + 3


def _slope_label(slope: Line) -> _Corners:
    """About where the bandwidth's name is: along its line, from where that begins."""
    length = _LETTER * len(slope.label) + 12
    turned = math.radians(slope.angle)
    return slope.x1 - 16, slope.y1 + length * math.sin(turned) - 16, slope.x1 + length * math.cos(turned), slope.y1


def _covers(box: _Corners, others: Sequence[_Corners]) -> bool:
    return any(box[0] < o[2] and o[0] < box[2] and box[1] < o[3] and o[1] < box[3] for o in others)


def _slope(bandwidth: float, x: LogAxis, y: LogAxis, top: float) -> Line:
    """The bandwidth's line, from where it enters the picture to the highest peak."""
    start = max(x.low, y.low / bandwidth)
    end = min(x.high, top / bandwidth)
    return Line(x.at(start), y.at(start * bandwidth), x.at(end), y.at(end * bandwidth), f"{bandwidth / 1e9:.3g} GB/s")


def _power(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:.10f}".rstrip("0")
