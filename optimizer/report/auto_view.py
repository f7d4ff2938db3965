"""The search for formats on the page: the Pareto curve, the format of each module, and the cost of each format
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from enginewright.optimizer.search.report import AutoReport, ParetoPoint
from enginewright.optimizer.shared.storage import kind_of, layer_of
from enginewright.passes.framework.records import Metric

from . import numbers
from .charts import NARROW, WIDE, LogAxis, Size
from .views import FigureView, figure_view

_LEFT, _RIGHT, _TOP, _BOTTOM = 74.0, 40.0, 16.0, 44.0
_BETWEEN_TICKS = 110.0
_LEAST_KL = 1e-9
"""The KL at which a choice without any cost is drawn on the logarithmic axis."""


@dataclass(frozen=True)
class Mark:
    """A labelled point of the chart: a single format, or the chosen formats."""

    x: float
    y: float
    label: str
    title: str
    chosen: bool


@dataclass(frozen=True)
class ParetoChart:
    """A chart of KL (logarithmic) by bytes.

    Attributes:
        x_ticks, y_ticks: positions and labels.
        line: the points of the curve, as an SVG polyline has them.
        marks: the labelled points.
        budget: the height of max_kl; None without one.
        size: of the chart; the other fields are its margins.
    """

    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    line: str
    marks: tuple[Mark, ...]
    budget: float | None
    size: Size
    top: float = _TOP
    bottom: float = 0.0
    left: float = _LEFT
    right: float = 0.0


@dataclass(frozen=True)
class FormatMap:
    """The format of each module of each layer.

    Attributes:
        formats: the formats, with the number of their modules.
        layers: the numbers of the layers, which are the columns.
        rows: a kind of modules, and for each layer the index of the format; None if the layer has no such module.
        elsewhere: modules outside layers, with their formats.
    """

    formats: tuple[tuple[str, int], ...]
    layers: tuple[int, ...]
    rows: tuple[tuple[str, tuple[int | None, ...]], ...]
    elsewhere: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class AutoView:
    """The charts and tables of a search for formats.

    Attributes:
        entry: the report of the search.
        charts: the curve for wide and for narrow windows; empty if there is no curve.
        formats: the format of each module.
        sensitivities: for each format, the cost of each unit that alone has it.
    """

    entry: AutoReport
    charts: tuple[ParetoChart, ...]
    formats: FormatMap
    sensitivities: tuple[FigureView, ...]


def auto_view(entry: AutoReport) -> AutoView:
    """Returns the charts and tables of a search for formats."""
    by_format: dict[str, list[Metric]] = {}
    for unit in entry.units:
        for option in unit.options:
            figure = Metric(where=unit.where, name=option.format, value=option.predicted_kl)
            by_format.setdefault(option.format, []).append(figure)
    shown = [
        figure_view("auto", f"KL if this alone is {name}", figures)
        for name, figures in by_format.items()
        if any(f.value > 0 for f in figures)
    ]
    charts = [pareto_chart(entry, size) for size in (WIDE, NARROW)]
    return AutoView(entry, tuple(c for c in charts if c is not None), _format_map(entry), tuple(shown))


def pareto_chart(entry: AutoReport, size: Size = WIDE) -> ParetoChart | None:
    """Returns the chart of a search; None if there is no curve."""
    points = [*entry.curve, *entry.single.values(), entry.chosen]
    if not entry.curve:
        return None
    kls = [_kl(p) for p in points] + ([entry.max_kl] if entry.max_kl else [])
    y = LogAxis.near(kls, size.height - _BOTTOM, _TOP, margin=1.5)
    low, high = min(p.bytes for p in points), max(p.bytes for p in points)
    margin = (high - low) * 0.06 or high * 0.06
    low, high = max(0, int(low - margin)), int(high + margin)

    def x(nbytes: float) -> float:
        return round(_LEFT + (nbytes - low) / (high - low) * (size.width - _LEFT - _RIGHT), 2)

    marks = [_mark(name, p, x(p.bytes), y.at(_kl(p)), chosen=False) for name, p in entry.single.items()]
    marks.append(_mark("chosen", entry.chosen, x(entry.chosen.bytes), y.at(_kl(entry.chosen)), chosen=True))
    parts = max(1, int((size.width - _LEFT - _RIGHT) / _BETWEEN_TICKS))
    ticks = [low + (high - low) * i / parts for i in range(parts + 1)]
    curve = sorted(entry.curve, key=lambda p: p.bytes)
    return ParetoChart(
        tuple((x(t), numbers.format_bytes(int(t))) for t in ticks),
        tuple((y.at(t), f"{t:g}") for t in y.more_ticks()),
        " ".join(f"{x(p.bytes)},{y.at(_kl(p))}" for p in curve),
        tuple(marks),
        y.at(entry.max_kl) if entry.max_kl else None,
        size,
        bottom=size.height - _BOTTOM,
        right=size.width - _RIGHT,
    )


def _kl(point: ParetoPoint) -> float:
    return max(point.predicted_kl if point.measured_kl is None else point.measured_kl, _LEAST_KL)


def _mark(name: str, point: ParetoPoint, x: float, y: float, *, chosen: bool) -> Mark:
    measured = "predicted" if point.measured_kl is None else "measured"
    title = f"{name}: {numbers.format_bytes(point.bytes)}, KL {numbers.significant(_kl(point))} ({measured})"
    return Mark(x, y, name, title, chosen)


def _format_map(entry: AutoReport) -> FormatMap:
    names = sorted({unit.format for unit in entry.units})
    counts = [(name, sum(unit.format == name for unit in entry.units)) for name in names]
    rows: dict[str, dict[int, int]] = {}
    elsewhere = []
    for unit in entry.units:
        layer = layer_of(unit.where.partition(" + ")[0])
        if layer is None:
            elsewhere.append((unit.where, unit.format))
        else:
            rows.setdefault(kind_of(unit.where), {})[layer] = names.index(unit.format)
    layers = tuple(sorted({layer for row in rows.values() for layer in row}))
    return FormatMap(tuple(counts), layers, _cells(rows, layers), tuple(elsewhere))


def _cells(rows: dict[str, dict[int, int]], layers: Sequence[int]) -> tuple[tuple[str, tuple[int | None, ...]], ...]:
    return tuple((kind, tuple(row.get(layer) for layer in layers)) for kind, row in rows.items())
