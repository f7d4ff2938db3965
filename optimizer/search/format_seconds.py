"""The time of a token with each format of each unit: a decode step of one request, timed before there is a bundle.

The program is lowered once for each format, with that format everywhere; no weight is read for it. On this machine its
steps run on random weights, as ``optimize plan`` does; on a GPU they are predicted. A unit's time is that of the steps
that read its weights. The rest of a step is equal for all formats, except for the rounding of inputs, which is divided
among the units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from enginewright.passes.framework.base import Pass, PassContext
from enginewright.passes.ir.program import Program
from enginewright.plugins.steps.planning import StepSeconds
from enginewright.runtime.shared.lowered_program import Step

from .format_units import FormatUnit, weight_node

NANOSECONDS = 1e9


class Clock(Protocol):
    """Times a token of programs: ``optimizer/plan/token_clock.py``."""

    @property
    def device(self) -> str:
        """The device whose times are measured or predicted."""

    def time(
        self, program: Program, passes: Sequence[Pass], context: PassContext
    ) -> tuple[tuple[Step, ...], StepSeconds]:
        """Gives the steps that passes make of a program, and their seconds."""


@dataclass(frozen=True)
class FormatSeconds:
    """Nanoseconds of a token.

    Attributes:
        units: of each unit, by its formats.
        fixed: of all else.
    """

    units: tuple[tuple[int, ...], ...]
    fixed: int


def time_formats(
    units: Sequence[FormatUnit],
    timed: Callable[[Sequence[int]], tuple[tuple[Step, ...], StepSeconds]],
    on_progress: Callable[[int, int, str], None],
) -> FormatSeconds:
    """Times each format of each unit: one program for each format, with it wherever it can be, else the smallest.

    Args:
        units: whose formats are timed.
        timed: gives the steps of a choice, by the index of each unit's format, and their seconds.
        on_progress: called with how many formats are done, of how many, and the next.
    """
    formats = list(dict.fromkeys(f for unit in units for f in unit.formats))
    owner = {str(weight_node(n).target): i for i, unit in enumerate(units) for n in unit.nodes}
    nanoseconds = [[0] * len(unit.formats) for unit in units]
    others: list[int] = []
    changed: list[list[tuple[int, int]]] = []
    for done, weight_format in enumerate(formats):
        on_progress(done, len(formats), f"timing {weight_format}")
        chosen = [u.formats.index(weight_format) if weight_format in u.formats else u.smallest for u in units]
        steps, seconds = timed(chosen)
        unit_seconds = [0.0] * len(units)
        other = seconds.around
        for step, step_seconds in zip(steps, seconds.steps, strict=True):
            reads = {i for o in step.inputs if o.kind == "weight" for i in _owners(o.name, owner)}
            if not reads:
                other += step_seconds
            for i in reads:
                unit_seconds[i] += step_seconds / len(reads)
        others.append(round(other * NANOSECONDS))
        places = [(i, o) for i, o in enumerate(chosen) if units[i].formats[o] == weight_format]
        changed.append(places)
        for i, o in places:
            nanoseconds[i][o] = round(unit_seconds[i] * NANOSECONDS)
    fixed = min(others)
    for other, places in zip(others, changed, strict=True):
        for i, o in places:
            nanoseconds[i][o] += (other - fixed) // len(places)
    return FormatSeconds(tuple(tuple(of) for of in nanoseconds), fixed)


def _owners(weight: str, owner: dict[str, int]) -> set[int]:
    """The units whose weight a lowered program has under that name, or a part of it: ``NAME.int4``, ``NAME.scales``."""
    while weight not in owner:
        weight, dot, _ = weight.rpartition(".")
        if not dot:
            return set()
    return {owner[weight]}
