"""Draws a load test as one picture: percentiles of the requests' times, and the course of the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from enginewright.optimizer.bench.plot import HEIGHT, WIDTH, Panel, Series, draw
from enginewright.optimizer.report.charts import LogAxis
from enginewright.optimizer.report.numbers import duration, rate
from enginewright.optimizer.shared.files import write_output
from enginewright.runtime.shared.json_document import printable

from .result import LoadResult
from .run import Record

_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, WIDTH - 20.0, 30.0, HEIGHT - 60.0
_SHARES = (0, 1, 2, 5, *range(10, 100, 5), 96, 97, 98, 99, 99.5, 99.9, 100)
_INTERVALS = 40
_TIMES: dict[str, tuple[str, Callable[[Record], float | None]]] = {
    "ttft": ("first token", lambda one: one.ttft),
    "tpot": ("time per token", lambda one: one.tpot),
    "end_to_end": ("end to end", lambda one: one.end_to_end),
}

Point = tuple[float, float]


def panels(result: LoadResult) -> list[Panel]:
    """Returns the charts of a result that have values."""
    charts = [_times(result), _tokens(result), _first_tokens(result)]
    return [panel for panel in charts if panel is not None]


def _times(result: LoadResult) -> Panel | None:
    """Returns a chart with the share of requests up to each time. Dashed lines are the goals."""
    goals = None if result.figures.goodput is None else vars(result.figures.goodput.goals)
    values = {
        name: [v for one in result.records if (v := of(one)) is not None and v > 0] for name, (_, of) in _TIMES.items()
    }
    known = [v for times in values.values() for v in times]
    if not known:
        return None
    goal_seconds = [goal for goal in (goals or {}).values() if goal is not None]
    x = LogAxis.around([*known, *goal_seconds], _LEFT, _RIGHT)
    series = []
    for colour, (name, (label, _)) in enumerate(_TIMES.items()):
        if not values[name]:
            continue
        places = np.percentile(values[name], _SHARES)
        goal = None if goals is None else goals[name]
        points = tuple((x.at(float(v)), _linear(share, 100.0)) for share, v in zip(_SHARES, places, strict=True))
        titles = tuple(f"{share:g} %: {label} {duration(float(v))}" for share, v in zip(_SHARES, places, strict=True))
        limits = () if goal is None else ((x.at(goal), _linear(0, 100)), (x.at(goal), _linear(100, 100)))
        series.append(Series(label, colour, points, limits, titles))
    ticks = tuple((x.at(t), duration(t)) for t in x.ticks())
    shares = tuple((_linear(share, 100), f"{share} %") for share in (0, 25, 50, 75, 100))
    return Panel("Requests that took no longer than", "seconds", ticks, shares, tuple(series))


def _tokens(result: LoadResult) -> Panel | None:
    """Returns a chart of the tokens per second over the time of the test."""
    if not result.seconds or not result.figures.tokens:
        return None
    width = result.seconds / _INTERVALS
    counts = np.zeros(_INTERVALS)
    for one in result.records:
        if one.first is None:
            continue
        times = one.first + np.concatenate([[0.0], np.cumsum(np.frombuffer(one.gaps, np.float32), dtype=np.float64)])
        places = np.minimum((times / width).astype(int), _INTERVALS - 1)
        np.add.at(counts, places, one.tokens / len(times))
    values = [((i + 0.5) * width, count / width) for i, count in enumerate(counts)]
    return _over_time("Tokens a second", result.seconds, [("all requests", values)], rate)


def _first_tokens(result: LoadResult) -> Panel | None:
    """Returns a chart of the times to the first token, by the time at which requests were due."""
    width = result.seconds / _INTERVALS
    lines: list[tuple[str, list[Point]]] = [("median", []), ("largest", [])]
    for i in range(_INTERVALS if result.seconds else 0):
        inside = [one.ttft for one in result.records if i * width <= one.due < (i + 1) * width and one.ttft is not None]
        if inside:
            lines[0][1].append(((i + 0.5) * width, float(np.median(inside))))
            lines[1][1].append(((i + 0.5) * width, max(inside)))
    return _over_time("Time to the first token", result.seconds, lines, duration) if lines[0][1] else None


def _over_time(
    title: str, seconds: float, lines: Sequence[tuple[str, Sequence[Point]]], written: Callable[[float], str]
) -> Panel:
    """Returns a chart of lines over the time of the test. Both axes begin at 0."""
    most = _round_up(max((y for _, values in lines for _, y in values), default=1.0) or 1.0)
    series = tuple(
        Series(
            label,
            colour,
            tuple((_across(x, seconds), _linear(y, most)) for x, y in values),
            (),
            tuple(f"{label} at {duration(x)}: {written(y)}" for x, y in values),
        )
        for colour, (label, values) in enumerate(lines)
    )
    steps = [i / 4 for i in range(5)]
    x_ticks = tuple((_across(share * seconds, seconds), duration(share * seconds) if share else "0") for share in steps)
    y_ticks = tuple((_linear(share * most, most), written(share * most) if share else "0") for share in steps)
    return Panel(title, "time of the test", x_ticks, y_ticks, series)


def _linear(value: float, most: float) -> float:
    return round(_BOTTOM - (_BOTTOM - _TOP) * min(1.0, value / most), 2)


def _across(value: float, most: float) -> float:
    return round(_LEFT + (_RIGHT - _LEFT) * value / most, 2)


def _round_up(value: float) -> float:
    """Returns the next of 1, 2, 4, 8 times a power of ten."""
    power = 10.0 ** np.floor(np.log10(value))
    return float(next(m * power for m in (1, 2, 4, 8, 10) if m * power >= value * (1 - 1e-9)))


def svg(result: LoadResult) -> str:
    """Returns the picture as an SVG text without external files."""
    work = result.workload
    how = f"{work['clients']} clients" if work["loop"] == "closed" else f"{work.get('rate', 'trace')} requests a second"
    note = f"{result.figures.finished:,} requests finished, {result.figures.failed:,} failed, {how}"
    goals = result.figures.goodput is not None
    return draw(panels(result), f"{printable(result.model)}: load test", note, dashed="the goal" if goals else "")


def write_svg(result: LoadResult, path: Path) -> None:
    """Writes the plot of a result to an SVG file. Raises BundleError if it can't be written."""
    write_output(path, svg(result))
