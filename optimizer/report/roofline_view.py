"""The roofline of the page and the terminal: steps grouped by kind, with their share of the limit."""

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
"""The least distance between two points that both get a label with the same kind."""
_NAMED = 0.02
"""The least share of a step's time of a group that gets a label."""
_APART = 40.0
"""The least distance between two ticks, so that their labels have room."""
_BAR, _BETWEEN, _KINDS = 26.0, 26.0, 8
"""The height of a bar, the space above it for its name, and the number of kinds with a colour of their own."""

_Corners = tuple[float, float, float, float]
"""A rectangle: left, top, right, bottom."""


@dataclass(frozen=True)
class StepGroup:
    """The steps of a shape with one op for the same modules of different layers.

    Attributes:
        op, kind: the name of the op, and of the modules without the layers' numbers.
        count: the number of steps.
        cost: the cost of all of them.
        seconds: their measured time; None if they weren't measured.
        limit: the least time on this machine; None if the machine wasn't measured.
        share: limit / seconds; None if either is missing, or the limit is 0.
        part: the share of these steps in the shape's time; None if it wasn't measured.
        bound: "memory" or "products", the larger limit; "" if neither limits the steps.
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
    """A shape with its groups of steps, in descending order of time.

    ``limit`` is the least time of all steps on this machine, in seconds; None if the machine wasn't measured.
    """

    shape: ShapeCosts
    groups: tuple[StepGroup, ...]
    limit: float | None

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens per second of the step alone, without the time between steps."""
        return self.shape.tokens / self.shape.seconds if self.shape.seconds else None

    @property
    def share(self) -> float | None:
        """The limit's time divided by the measured time: 1 is as fast as this machine can be."""
        return self.limit / self.shape.seconds if self.limit is not None and self.shape.seconds else None


@dataclass(frozen=True)
class Point:
    """A group of steps in the chart; ``series`` is the index of its shape."""

    x: float
    y: float
    size: float
    series: int
    title: str


@dataclass(frozen=True)
class Line:
    """A limit in the chart, from (x1, y1) to (x2, y2), with the position of its label.

    The label of a sloping line is turned, and begins at that position.
    """

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
        """The clockwise angle of the line in degrees, by which its label is turned."""
        return round(math.degrees(math.atan2(self.y2 - self.y1, self.x2 - self.x1)), 1)


@dataclass(frozen=True)
class RooflineChart:
    """A roofline chart: points by multiply-adds per byte (x) and per second (y), below the limits of this machine.

    ``labels`` are x, y, text-anchor and text of each label of a point.
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
    """The part of a bar for one kind of modules.

    Attributes:
        x, width: its position.
        colour: the index of its kind in the legend.
        text: its label; "" if there is no room.
        title: its tooltip.
    """

    x: float
    width: float
    colour: int
    text: str
    title: str


@dataclass(frozen=True)
class TimeBar:
    """A bar of a chart that divides the time of a step into slices. ``y`` is the position of its top edge."""

    name: str
    note: str
    y: float
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class TimeBars:
    """A bar for each shape that was timed, all of one length. ``kinds`` are the names of the colours."""

    size: Size
    bar: float
    bars: tuple[TimeBar, ...]
    kinds: tuple[str, ...]


def shape_view(shape: ShapeCosts, machine: Machine | None) -> ShapeView:
    """Returns a shape with its steps in groups; ``machine`` is the measured machine, None if it wasn't measured."""
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
    """Returns a chart with a bar for each shape that was timed; None if no shape was timed.

    Every bar is ``width`` wide. Its slices are the shares of the shape's time that each kind of module takes.
    """
    timed = [view for view in views if view.shape.seconds]
    parts: dict[str, float] = {}
    for group in (group for view in timed for group in view.groups):
        parts[group.kind] = max(parts.get(group.kind, 0.0), group.part or 0.0)
    if not parts:
        return None
    kinds = sorted(parts, key=lambda kind: -parts[kind])[:_KINDS]
    bars = [
        TimeBar(
            view.shape.name,
            duration(view.shape.seconds or 0.0),
            i * (_BAR + _BETWEEN) + _BETWEEN - 6,
            _slices(view, kinds, width),
        )
        for i, view in enumerate(timed)
    ]
    names = tuple(kinds) + (("others",) if len(parts) > len(kinds) else ())
    return TimeBars(Size(width, len(bars) * (_BAR + _BETWEEN)), _BAR, tuple(bars), names)


def _slices(view: ShapeView, kinds: Sequence[str], width: float) -> tuple[Slice, ...]:
    """Returns the slices of a shape's time: one for each kind of modules in ``kinds``, and one for all others.

    ``width``: the width of the whole bar.
    """
    seconds = dict.fromkeys([*kinds, ""], 0.0)
    for group in view.groups:
        seconds[group.kind if group.kind in kinds else ""] += group.seconds or 0.0
    whole = sum(seconds.values()) or 1.0
    slices = []
    for colour, (kind, (x, length)) in enumerate(zip(seconds, stacked([*seconds.values()], width), strict=True)):
        share = f"{100 * seconds[kind] / whole:.0f} %"
        texts = f"{short_name(kind) or 'others'} {share}", share
        text = next((text for text in texts if _LETTER * len(text) + 10 < length), "")
        if length:
            slices.append(Slice(x, length, colour, text, f"{kind or 'others'}: {share}"))
    return tuple(slices)


def short_name(kind: str) -> str:
    """Shortens a kind of modules for a chart: "self_attn.q_proj + self_attn.k_proj" is "q+k"."""
    last = [part.rpartition(".")[2] for part in re.split(r"\s*\+\s*", kind)]
    return "+".join(part.removesuffix("_proj").replace("layernorm", "norm") for part in last)


def chart(roofline: Roofline, views: Sequence[ShapeView], size: Size = WIDE) -> RooflineChart | None:
    """Returns the chart of some shapes; None if no step with products and bytes was measured."""
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
    """Returns the ticks (position, label) whose labels have room."""
    apart: list[tuple[float, str]] = []
    for tick in ticks:
        if not apart or abs(tick[0] - apart[-1][0]) >= _APART:
            apart.append(tick)
    return tuple(apart)


def _roofs(machine: Machine, x: LogAxis, y: LogAxis, slope: Line) -> list[Line]:
    """Returns a line for each type of products, lowest first, each labelled where no other label is."""
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
    """Returns labels next to the largest points, at positions where they cover no other label, line or point.

    A point isn't labelled if a nearby point has the same label.

    Args:
        points: each point, the name of its modules, and True if it is large enough for a label.
        lines: the bandwidth's line first, then the others.
        size: the size of the chart.
    """
    boxes = _obstacles([point for point, _, _ in points], lines)
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


def _obstacles(points: Sequence[Point], lines: Sequence[Line]) -> list[_Corners]:
    """Returns boxes around the lines, their names and the points of a chart; the first line is the sloping one."""
    slope, *roofs = lines
    boxes = [_slope_label(slope), *(_text_box(r.label_x, r.label_y, r.anchor, r.label) for r in roofs)]
    boxes += [(r.x1, r.y1 - 1, r.x2, r.y1 + 1) for r in roofs]
    boxes += [(p.x - p.size, p.y - p.size, p.x + p.size, p.y + p.size) for p in points]
    for step in range(101):
        x, y = slope.x1 + step / 100 * (slope.x2 - slope.x1), slope.y1 + step / 100 * (slope.y2 - slope.y1)
        boxes.append((x - 1, y - 1, x + 1, y + 1))
    return boxes


def _text_box(x: float, y: float, anchor: str, text: str) -> _Corners:
    """Returns the corners of a text: letters rise about 10 above the baseline and descend 3 below."""
    left = x - _LETTER * len(text) if anchor == "end" else x
    return left, y - 11, left + _LETTER * len(text), y + 3


def _slope_label(slope: Line) -> _Corners:
    """Returns a box around the label of the bandwidth's line. The label is parallel to the line, above it."""
    turned, length = math.radians(slope.angle), _LETTER * len(slope.label)
    end_x, end_y = slope.label_x + length * math.cos(turned), slope.label_y + length * math.sin(turned)
    return slope.label_x - 12, end_y - 12, end_x, slope.label_y


def _named_slope(slope: Line, points: Sequence[Point]) -> Line:
    """Returns the line with its label at the position that covers the fewest points, the first of several such."""
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
    """Returns the bandwidth's line, from where it enters the picture to the highest peak."""
    start = max(x.low, y.low / bandwidth)
    end = min(x.high, top / bandwidth)
    return Line(
        x.at(start), y.at(start * bandwidth), x.at(end), y.at(end * bandwidth), f"memory: {bandwidth / 1e9:.3g} GB/s"
    )


def _power(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:.10f}".rstrip("0")
