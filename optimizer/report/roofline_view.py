"""A roofline as the page and the terminal show it: steps of one kind together, with their share of the limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from enginewright.plugins.step_costs import StepCost

from .charts import LogAxis
from .machine import Machine
from .roofline import Roofline, ShapeCosts, StepTime, limit_seconds, multiply_seconds
from .storage import kind_of

WIDTH, HEIGHT = 760.0, 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 24.0, 16.0, 44.0
_LETTER, _LINE, _LONGEST = 6.6, 15.0, 34


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
    """A limit in the chart."""

    x1: float
    y1: float
    x2: float
    y2: float
    label: str

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
    lines = [_slope(machine.bandwidth, x, y, top)]
    for kind, peak in sorted(machine.peaks.items(), key=lambda item: item[1]):
        lines.append(Line(x.at(peak / machine.bandwidth), y.at(peak), x.at(x.high), y.at(peak), f"{kind} products"))
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
        tuple(_labels([(p, g.kind) for p, (_, g, _, _) in zip(points, found, strict=True)], [n.y1 for n in lines[1:]])),
    )


def _labels(points: Sequence[tuple[Point, str]], roofs: Sequence[float]) -> list[tuple[float, float, str, str]]:
    """Names beside the largest points, where they cover neither one another nor leave the picture.

    ``roofs``: where lines go through the picture, which would strike a name out: it goes below them.
    """
    found: list[tuple[float, float, str, str]] = []
    taken: list[tuple[float, float, float]] = []
    for point, name in sorted(points, key=lambda item: -item[0].size):
        text = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
        width = _LETTER * len(text)
        left = point.x + point.size + 4 + width > WIDTH
        x, y = point.x + (-1 if left else 1) * (point.size + 4), point.y + 4
        y = next((roof + _LINE for roof in roofs if -4 < y - roof < _LINE), y)
        start = x - width if left else x
        if all(abs(y - other) > _LINE or start > end or start + width < begin for begin, end, other in taken):
            taken.append((start, start + width, y))
            found.append((round(x, 1), y, "end" if left else "start", text))
    return found


def _slope(bandwidth: float, x: LogAxis, y: LogAxis, top: float) -> Line:
    """The bandwidth's line, from where it enters the picture to the highest peak."""
    start = max(x.low, y.low / bandwidth)
    end = min(x.high, top / bandwidth)
    return Line(x.at(start), y.at(start * bandwidth), x.at(end), y.at(end * bandwidth), f"{bandwidth / 1e9:.3g} GB/s")


def _power(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:.10f}".rstrip("0")
