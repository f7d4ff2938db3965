"""The plan as one picture: for each device the time per token, and to the first one, by batch, with the goals."""

from __future__ import annotations

from pathlib import Path

from enginewright.optimizer.bench.plot import Panel, PlotLine, draw, panel_of
from enginewright.optimizer.report.numbers import duration
from enginewright.optimizer.shared.files import write_output

from .result import PlanResult

_TIMES = {"tpot": "time per token", "ttft": "time to the first token"}


def panels(result: PlanResult) -> list[Panel]:
    """Returns the charts of a plan that have values."""
    charts = []
    for device in result.devices:
        for name, title in _TIMES.items():
            lines = [
                PlotLine(
                    ", ".join(plan.recipes),
                    colour,
                    tuple(
                        (s.batch, seconds, result.options[name], f"{plan.recipes[0]}, {s.batch:,}: {duration(seconds)}")
                        for s in plan.speeds
                        if (seconds := getattr(s, name)) is not None
                    ),
                )
                for colour, plan in enumerate(p for p in result.plans if p.device == device.name)
            ]
            measured = "kernels timed here" if device.measured else "predicted"
            charts.append(panel_of(f"{device.name}, {title} ({measured})", "requests", lines, duration))
    return [panel for panel in charts if panel is not None]


def svg(result: PlanResult) -> str:
    """Returns the picture as an SVG text without external files."""
    note = f"requests of {result.options['context']:,} tokens, prompts of {result.options['prompt']:,}"
    goals = any(result.options[name] is not None for name in _TIMES)
    return draw(panels(result), f"{result.model}, planned", note, dashed="the goal" if goals else "")


def write_svg(result: PlanResult, path: Path) -> None:
    """Writes the plot of a result to an SVG file. Raises BundleError if it can't be written."""
    write_output(path, svg(result))
