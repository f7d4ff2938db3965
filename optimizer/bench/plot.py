"""Draws a result as one SVG picture: decoding speed by batch and context, and time to the first token by prompt
length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from enginewright.optimizer.report.charts import LogAxis
from enginewright.optimizer.report.numbers import duration, rate
from enginewright.optimizer.report.page import template
from enginewright.optimizer.shared.files import write_output
from enginewright.runtime.shared.errors import BundleError

from .result import BenchResult

WIDTH, HEIGHT = 620.0, 340.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 20.0, 30.0, 60.0

_LABELS, _LABEL_HEIGHT = 3, 18
"""The number of labels in a row of the legend, and the height of each further row."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A series of a chart, in the units of the picture.

    Attributes:
        label: text in the legend.
        colour: number of the colour.
        points: the measured points.
        limits: points of the machine's limit.
        titles: tooltips of the measured points.
    """

    label: str
    colour: int
    points: tuple[Point, ...]
    limits: tuple[Point, ...]
    titles: tuple[str, ...]


@dataclass(frozen=True)
class Panel:
    """One chart.

    Attributes:
        title, x_label: the texts above the chart and below the horizontal axis.
        x_ticks, y_ticks: the position and the label of each tick.
        series: the lines of the chart.
        left, right, top, bottom: the edges of the area between the axes.
    """

    title: str
    x_label: str
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    series: tuple[Series, ...]
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = HEIGHT - _BOTTOM


@dataclass(frozen=True)
class PlotLine:
    """A series in its own units. Values are (x, y, limit of y or None, tooltip)."""

    label: str
    colour: int
    values: tuple[tuple[float, float, float | None, str], ...]


def panels(result: BenchResult) -> list[Panel]:
    """Returns a panel of decoding speed by batch and one of time to first token by prompt length, if they have
    values.
    """
    decodes = []
    for i, context in enumerate(dict.fromkeys(d.context for d in result.decodes)):
        values = [
            (
                d.batch,
                d.tokens_per_second,
                d.batch / d.limit_seconds if d.limit_seconds else None,
                f"{d.batch} at {context:,} tokens: {rate(d.tokens_per_second)} tokens/s",
            )
            for d in result.decodes
            if d.context == context and d.tokens_per_second
        ]
        decodes.append(PlotLine(f"{context:,} tokens of context", i, tuple(values)))
    prompts = [
        (p.tokens, p.ttft.median, p.limit_seconds, f"{p.tokens:,} tokens: {duration(p.ttft.median)}")
        for p in result.prompts
        if p.ttft is not None
    ]
    charts = [
        panel_of("Decoding, tokens a second of all requests", "requests", decodes, rate),
        panel_of("Time to the first token", "tokens of the prompt", [PlotLine("prompt", 0, tuple(prompts))], duration),
    ]
    return [panel for panel in charts if panel is not None]


def panel_of(title: str, x_label: str, lines: Sequence[PlotLine], written: Callable[[float], str]) -> Panel | None:
    """Returns a chart of ``lines``, whose ticks ``written`` formats; None if the lines have no values."""
    lines = [line for line in lines if line.values]
    if not lines:
        return None
    everything = [v for line in lines for v in line.values]
    x = _axis([v[0] for v in everything], _LEFT, WIDTH - _RIGHT)
    y = LogAxis.around([n for v in everything for n in (v[1], v[2]) if n], HEIGHT - _BOTTOM, _TOP)
    series = tuple(
        Series(
            line.label,
            line.colour,
            tuple((x.at(v[0]), y.at(v[1])) for v in line.values),
            tuple((x.at(v[0]), y.at(v[2])) for v in line.values if v[2]),
            tuple(v[3] for v in line.values),
        )
        for line in lines
    )
    x_ticks = tuple((x.at(n), f"{n:,}") for n in sorted({int(v[0]) for v in everything}))
    return Panel(title, x_label, x_ticks, tuple((y.at(t), written(t)) for t in y.ticks()), series)


def _axis(values: Sequence[float], start: float, end: float) -> LogAxis:
    """Makes an axis from the least to the greatest value, with some margin."""
    return LogAxis(min(values) / 1.3, max(values) * 1.3, start, end)


def svg(result: BenchResult) -> str:
    """Returns the picture of a result as SVG text, which refers to no other file."""
    about = [str(result.machine["processor"]), *(f"{k} {v}" for k, v in result.engine.items())]
    return draw(panels(result), f"{result.model}, {result.recipe or result.target}", ", ".join(about))


def draw(found: Sequence[Panel], title: str, note: str, *, dashed: str = "the machine's limit") -> str:
    """Returns SVG text with the charts below each other; ``dashed`` is the legend of the series' limits, if there
    are any.
    """
    rows = max((-(-len(panel.series) // _LABELS) for panel in found), default=1)
    height = HEIGHT + (rows - 1) * _LABEL_HEIGHT
    shown = {"panels": found, "width": WIDTH, "height": height, "title": title, "note": note, "dashed": dashed}
    return template("bench.svg.j2").render(shown, labels=_LABELS, label_height=_LABEL_HEIGHT)


def check_folder(path: Path) -> None:
    """Raises BundleError if the folder of ``path`` doesn't exist. It is called before minutes of measuring."""
    if not path.absolute().parent.is_dir():
        raise BundleError(f"{path}: there is no such folder", hint="Make the folder, or name another.")


def write_svg(result: BenchResult, path: Path) -> None:
    """Writes the picture of a result to ``path``. Raises BundleError if the file can't be written."""
    write_output(path, svg(result))
