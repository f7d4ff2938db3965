"""The lines that ``optimize export`` and ``optimize report`` print about a search for formats."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from enginewright.optimizer.search.report import AutoReport, ParetoPoint

_POINTS = 12
"""The most points of the Pareto curve that are shown."""


def print_auto(console: Console, auto: AutoReport) -> None:
    """Prints the Pareto curve, the sizes with a single format, and the number of modules with each format."""
    from rich.table import Table

    from enginewright.runtime.shared.memory import format_bytes

    table = Table(box=None, pad_edge=False)
    for heading in ("formats", "bytes", "KL predicted", "measured"):
        table.add_column(heading, justify="left" if heading == "formats" else "right")

    def row(name: str, point: ParetoPoint) -> None:
        measured = "" if point.measured_kl is None else f"{point.measured_kl:.4f}"
        table.add_row(name, format_bytes(point.bytes), f"{point.predicted_kl:.4f}", measured)

    points = [*((f"all {name}", p) for name, p in auto.single.items()), *(("mixed", p) for p in _spread(auto.curve))]
    for name, point in sorted([*points, ("chosen", auto.chosen)], key=lambda entry: entry[1].bytes, reverse=True):
        row(name, point)
    budget = [f"KL {auto.max_kl:g}"] if auto.max_kl is not None else []
    budget += [format_bytes(auto.max_bytes)] if auto.max_bytes is not None else []
    budget += [f"{auto.time.budget:g} ms a token"] if auto.time is not None else []
    counts = Counter(unit.format for unit in auto.units).most_common()
    console.print(f"\nformats by cost, for at most {' and '.join(budget)}:", markup=False)
    console.print(table)
    console.print("chosen: " + ", ".join(f"{n} of {name}" for name, n in counts), markup=False, soft_wrap=True)
    console.print(
        "KL: " + ", ".join(f"{kl:.4f} on {kind}" for kind, kl in auto.measured_kl.items()), markup=False, soft_wrap=True
    )

    if (time := auto.time) is not None:
        measured = "" if time.measured is None else f", {time.measured:.3g} of the bundle"
        console.print(
            f"milliseconds a token on {time.device}: {time.predicted:.3g} predicted, {time.timed:.3g} timed{measured}",
            markup=False,
            soft_wrap=True,
        )


def _spread(curve: tuple[ParetoPoint, ...]) -> list[ParetoPoint]:
    count = min(_POINTS, len(curve))
    return [curve[i * (len(curve) - 1) // max(count - 1, 1)] for i in range(count)]
