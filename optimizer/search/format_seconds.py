"""Times a decode step of one request with each format of each unit, before a bundle is exported.

The program is lowered once for each format, with that format everywhere; no weight is read for it. On this machine the
steps run on random weights, as in ``optimize plan``; on a GPU they are predicted. The time of a unit is that of the
steps that read its weights. The rest is equal for all formats, except for the rounding of inputs, whose time is divided
among the units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from enginewright.passes.framework.base import Pass, PassContext
from enginewright.passes.ir.program import Program
from enginewright.passes.quantization.choose_formats import weight_node
from enginewright.plugins.steps.planning import StepSeconds
from enginewright.runtime.shared.lowered_program import Step

from .format_units import FormatUnit

NANOSECONDS = 1e9


class Clock(Protocol):
    """Times a token of programs. ``optimizer/plan/token_clock.py`` implements it."""

    @property
    def device(self) -> str:
        """The device whose times are measured or predicted."""

    def time(
        self, program: Program, passes: Sequence[Pass], context: PassContext
    ) -> tuple[tuple[Step, ...], StepSeconds]:
        """Returns the steps of a program after some passes, and their seconds."""


@dataclass(frozen=True)
class FormatSeconds:
    """The time of a token by formats, in nanoseconds.

    Attributes:
        units: for each unit, the time with each of its formats.
        fixed: the time of everything else.
    """

    units: tuple[tuple[int, ...], ...]
    fixed: int


def time_formats(
    units: Sequence[FormatUnit],
    timed: Callable[[Sequence[int]], tuple[tuple[Step, ...], StepSeconds]],
    on_progress: Callable[[int, int, str], None],
) -> FormatSeconds:
    """Times each format of each unit, with one program for each format.

    In such a program, a unit that can't have the format has its smallest one.

    Args:
        units: the units whose formats are timed.
        timed: returns the steps and their seconds, given the index of the format of each unit.
        on_progress: called with the number of formats that are timed, the number of all, and the next one.
    """
    formats = list(dict.fromkeys(f for unit in units for f in unit.formats))
    nanoseconds = [[0] * len(unit.formats) for unit in units]
    others: list[int] = []
    changed: list[list[tuple[int, int]]] = []
    for done, weight_format in enumerate(formats):
        on_progress(done, len(formats), f"timing {weight_format}")
        chosen = [u.formats.index(weight_format) if weight_format in u.formats else u.smallest for u in units]
        unit_seconds, other = _by_unit(*timed(chosen), units)
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


def _by_unit(steps: Sequence[Step], seconds: StepSeconds, units: Sequence[FormatUnit]) -> tuple[Sequence[float], float]:
    """Returns the seconds of the steps that read each unit's weights, and those of all other steps.

    The time of a step that reads weights of several units is divided equally among them.
    """
    owner = {str(weight_node(n).target): i for i, unit in enumerate(units) for n in unit.nodes}
    unit_seconds, other = [0.0] * len(units), seconds.around
    for step, step_seconds in zip(steps, seconds.steps, strict=True):
        reads = {i for o in step.inputs if o.kind == "weight" for i in _owners(o.name, owner)}
        if not reads:
            other += step_seconds
        for i in reads:
            unit_seconds[i] += step_seconds / len(reads)
    return unit_seconds, other


def _owners(weight: str, owner: dict[str, int]) -> set[int]:
    """Returns the number of the unit with a weight of a lowered program, in a set; an empty set if it is in no unit.

    Args:
        weight: the name of the weight or of a part of it, such as ``NAME.int4`` or ``NAME.scales``.
        owner: the number of the unit of each weight of the program before lowering.
    """
    while weight not in owner:
        weight, dot, _ = weight.rpartition(".")
        if not dot:
            return set()
    return {owner[weight]}
