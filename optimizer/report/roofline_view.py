"""A roofline as the page and the terminal show it: steps of one kind together, with their share of the limit."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from enginewright.optimizer.shared.storage import kind_of
from enginewright.plugins.cpu.compile.machine import Machine, limit_seconds, multiply_seconds
from enginewright.runtime.shared.step_costs import StepCost

from .charts import WIDE, LogAxis, Size, stacked
from .numbers import duration
from .roofline import Roofline, ShapeCosts, StepTime

_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 18.0, 16.0, 46.0
_LETTER, _LINE, _LONGEST = 7.3, 15.0, 24
_NEARBY = 60.0
"""The distance of one kind's names, of which one is then too many."""
_NAMED = 0.02
"""The share of a step's time that a point must have to be named."""
_APART = 40.0
"""Between ticks, at least: their labels are some letters wide."""
_BAR, _BETWEEN, _KINDS = 26.0, 26.0, 8
"""A bar's height, the space above it for its name, and the kinds that have a colour of their own."""

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
        """The speed of the step, without what happens between steps."""
        return self.shape.tokens / self.shape.seconds if self.shape.seconds else None

    @property
    def share(self) -> float | None:
        """The limit's time as a share of the measured one: 1 is as fast as this machine can be."""
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
    """A limit in the chart, and where its name is; that of one that slopes is along it, from this place on."""

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
        """The angle in degrees, as a picture turns: down is positive."""
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
    size: Size
    top: float = _TOP
    bottom: float = 0.0
    left: float = _LEFT
    right: float = 0.0


@dataclass(frozen=True)
class Slice:
    """A kind of modules in a bar: ``colour`` is its place in the legend. ``text`` is empty where there is no room."""

    x: float
    width: float
    colour: int
    text: str
    title: str


@dataclass(frozen=True)
class TimeBar:
    """A bar that divides the time of a shape's step; ``y`` is the bar's top."""

    name: str
    note: str
    y: float
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class TimeBars:
    """A bar for each shape that was timed, all of one length; and the names of the colours."""

    size: Size
    bar: float
    bars: tuple[TimeBar, ...]
    kinds: tuple[str, ...]


def shape_view(shape: ShapeCosts, machine: Machine | None) -> ShapeView:
    """The groups of a shape."""
    by_kind: dict[tuple[str, str], list[StepTime]] = {}
    for step in shape.steps:
        by_kind.setdefault((step.op, kind_of(step.where)), []).append(step)
    groups = [_group(op, kind, steps, shape.seconds, machine) for (op, kind), steps in by_kind.items()]
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


def time_bars(views: Sequence[ShapeView], width: float) -> TimeBars | None:
    """The bars; None if nothing was timed."""
    timed = [view for view in views if view.shape.seconds]
    parts: dict[str, float] = {}
    for view in timed:
        for g in view.groups:
            parts[g.kind] = max(parts.get(g.kind, 0.0), g.part or 0.0)
    if not parts:
        return None
    kinds = sorted(parts, key=lambda kind: -parts[kind])[:_KINDS]
    bars = []
    for i, view in enumerate(timed):
        seconds = dict.fromkeys([*kinds, ""], 0.0)
        for g in view.groups:
            seconds[g.kind if g.kind in kinds else ""] += g.seconds or 0.0
        whole = sum(seconds.values()) or 1.0
        places = stacked([seconds[kind] for kind in seconds], width)
        slices = []
        for colour, (kind, (x, length)) in enumerate(zip(seconds, places, strict=True)):
            share = f"{100 * seconds[kind] / whole:.0f} %"
            named = f"{short_name(kind) or 'others'} {share}"
            text = next((t for t in (named, share) if _LETTER * len(t) + 10 < length), "")
            if length:
                slices.append(Slice(x, length, colour, text, f"{kind or 'others'}: {share}"))
        y = i * (_BAR + _BETWEEN) + _BETWEEN - 6
        bars.append(TimeBar(view.shape.name, duration(view.shape.seconds or 0.0), y, tuple(slices)))
    names = tuple(kinds) + (("others",) if len(parts) > len(kinds) else ())
    return TimeBars(Size(width, len(bars) * (_BAR + _BETWEEN)), _BAR, tuple(bars), names)


def short_name(kind: str) -> str:
    """Shortens a kind of modules for a chart: "self_attn.q_proj + self_attn.k_proj" is "q+k"."""
    last = [part.rpartition(".")[2] for part in re.split(r"\s*\+\s*", kind)]
    return "+".join(part.removesuffix("_proj").replace("layernorm", "norm") for part in last)


def chart(roofline: Roofline, views: Sequence[ShapeView], size: Size = WIDE) -> RooflineChart | None:
    """The chart; None if nothing was measured that has products and bytes."""
    machine = roofline.machine
    groups = [
        (i, g, g.cost.multiply_adds / g.cost.memory, g.cost.multiply_adds / g.seconds)
        for i, view in enumerate(views)
        for g in view.groups
        if g.seconds and g.cost.multiply_adds and g.cost.memory
    ]
    if machine is None or not groups:
        return None
    top = max(machine.peaks.values())
    ridge = top / machine.bandwidth
    x = LogAxis.near([*(x for _, _, x, _ in groups), ridge], _LEFT, size.width - _RIGHT, margin=2.0)
    y = LogAxis.near([*(y for *_, y in groups), top], size.height - _BOTTOM, _TOP, margin=1.7)
    points = [
        Point(
            x.at(per_byte),
            y.at(per_second),
            round(3 + 9 * math.sqrt(g.part or 0), 1),
            i,
            f"{views[i].shape.name}: {g.op} {g.kind}, {per_byte:.3g} multiply-adds a byte, {per_second / 1e9:.3g} G/s",
        )
        for i, g, per_byte, per_second in groups
    ]
    slope = _named_slope(_slope(machine.bandwidth, x, y, top), points)
    lines = [slope, *_roofs(machine, x, y, slope)]
    named = [(p, short_name(g.kind), (g.part or 0) >= _NAMED) for p, (_, g, _, _) in zip(points, groups, strict=True)]
    return RooflineChart(
        _spread([(x.at(t), _power(t)) for t in x.more_ticks()]),
        _spread([(y.at(t), _power(t / 1e9)) for t in y.more_ticks()]),
        tuple(lines),
        tuple(sorted(points, key=lambda p: -p.size)),
        tuple(_labels(named, lines, size)),
        size,
        bottom=size.height - _BOTTOM,
        right=size.width - _RIGHT,
    )


def _spread(ticks: Sequence[tuple[float, str]]) -> tuple[tuple[float, str], ...]:
    """The ticks whose labels have room."""
    apart: list[tuple[float, str]] = []
    for tick in ticks:
        if not apart or abs(tick[0] - apart[-1][0]) >= _APART:
            apart.append(tick)
    return tuple(apart)


def _roofs(machine: Machine, x: LogAxis, y: LogAxis, slope: Line) -> list[Line]:
    """A line for each type of products, lowest first, each named where no other name stands."""
    boxes = [_slope_label(slope)]
    lines = []
    for kind, peak in sorted(machine.peaks.items(), key=lambda item: item[1]):
        start, end, height = x.at(peak / machine.bandwidth), x.at(x.high), y.at(peak)
        text = f"{kind}: {peak / 1e9:.3g} G/s"
        drops = [-6.0, _LINE, -6 - _LINE, 2 * _LINE, 3 * _LINE]
        places = [(at, height + drop, side) for drop in drops for at, side in ((end - 6, "end"), (start + 24, "start"))]
        places = [p for p in places if p[1] > _TOP]
        at = next((p for p in places if not _covers(_text_box(*p, text), boxes)), places[0])
        boxes.append(_text_box(*at, text))
        lines.append(Line(start, height, end, height, text, *at))
    return lines


def _labels(
    points: Sequence[tuple[Point, str, bool]], lines: Sequence[Line], size: Size
) -> list[tuple[float, float, str, str]]:
    """Names beside, below or above the largest points, where nothing else is: no name, no line, no other point.

    A kind of module that has been named at a point nearby is not named again.
    """
    slope, *roofs = lines
    boxes = [_slope_label(slope), *(_text_box(r.label_x, r.label_y, r.anchor, r.label) for r in roofs)]
    boxes += [(r.x1, r.y1 - 1, r.x2, r.y1 + 1) for r in roofs]
    boxes += [(p.x - p.size, p.y - p.size, p.x + p.size, p.y + p.size) for p, _, _ in points]
    steps = [i / 100 for i in range(101)]
    boxes += [
        (x - 1, y - 1, x + 1, y + 1)
        for x, y in ((slope.x1 + s * (slope.x2 - slope.x1), slope.y1 + s * (slope.y2 - slope.y1)) for s in steps)
    ]
    labels: list[tuple[float, float, str, str]] = []
    for point, name in sorted(((p, n) for p, n, named in points if named), key=lambda item: -item[0].size):
        text = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
        away = point.size + 4
        places = [(point.x + side * away, point.y + drop) for drop in (4, away + 10, -away - 2) for side in (1, -1)]
        for at_x, at_y in places:
            anchor = "start" if at_x > point.x else "end"
            box = _text_box(at_x, at_y, anchor, text)
            inside = box[0] >= _LEFT and box[2] <= size.width - 4 and box[1] >= 0 and box[3] <= size.height - _BOTTOM
            named = any(t == text and abs(x - at_x) < _NEARBY and abs(y - at_y) < _NEARBY for x, y, _, t in labels)
            if inside and not named and not _covers(box, boxes):
                boxes.append(box)
                labels.append((round(at_x, 1), round(at_y, 1), anchor, text))
                break
    return labels


def _text_box(x: float, y: float, anchor: str, text: str) -> _Corners:
    """The corners of a text: letters rise about 10 above the baseline and descend 3 below."""
    left = x - _LETTER * len(text) if anchor == "end" else x
    return left, y - 11, left + _LETTER * len(text), y + 3


def _slope_label(slope: Line) -> _Corners:
    """About where the bandwidth's name is: along its line, on the upper side."""
    turned, length = math.radians(slope.angle), _LETTER * len(slope.label)
    end_x, end_y = slope.label_x + length * math.cos(turned), slope.label_y + length * math.sin(turned)
    return slope.label_x - 12, end_y - 12, end_x, slope.label_y


def _named_slope(slope: Line, points: Sequence[Point]) -> Line:
    """The line with its name where the fewest points are in its way, rather at the beginning."""
    turned, length = math.radians(slope.angle), math.hypot(slope.x2 - slope.x1, slope.y2 - slope.y1)
    free = length - _LETTER * len(slope.label) - 12
    places = [12 + max(free - 12, 0.0) * i / 8 for i in range(9)]

    def at(place: float) -> Line:
        return replace(
            slope,
            label_x=round(slope.x1 + place * math.cos(turned), 1),
            label_y=round(slope.y1 + place * math.sin(turned), 1),
        )

    def in_the_way(line: Line) -> int:
        steps = range(0, int(_LETTER * len(slope.label)), 4)
        spots = [
            (line.label_x + s * math.cos(turned) + 10 * math.sin(turned), line.label_y + s * math.sin(turned) - 10)
            for s in steps
        ]
        return sum(any(math.hypot(x - p.x, y - p.y) < p.size + 12 for x, y in spots) for p in points)

    return min((at(place) for place in places), key=in_the_way)


def _covers(box: _Corners, others: Sequence[_Corners]) -> bool:
    return any(box[0] < o[2] and o[0] < box[2] and box[1] < o[3] and o[1] < box[3] for o in others)


def _slope(bandwidth: float, x: LogAxis, y: LogAxis, top: float) -> Line:
    """The bandwidth's line, from where it enters the picture to the highest peak."""
    start = max(x.low, y.low / bandwidth)
    end = min(x.high, top / bandwidth)
    return Line(
        x.at(start), y.at(start * bandwidth), x.at(end), y.at(end * bandwidth), f"memory: {bandwidth / 1e9:.3g} GB/s"
    )


def _power(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:.10f}".rstrip("0")
