"""How long a token takes with each format of each unit: a decode step of one request, timed before there is a bundle.

The program is lowered once for each format, with that format everywhere; no weight is read for it. On this machine its
steps are run on made-up weights, as ``optimize plan`` does; on a GPU they are predicted. A unit takes as long as the
steps that read its weights. What is left of a step is the same for all formats but for how inputs are rounded, which is
divided among the units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from enginewright.optimizer.pipeline.pipeline import left_on
from enginewright.optimizer.plan.devices import default_shares, find_devices
from enginewright.optimizer.plan.engine_seconds import engine_seconds
from enginewright.optimizer.plan.programs import planning_of, target_on
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.targets import TARGETS
from enginewright.passes.framework.base import Pass, PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.ir.program import Program
from enginewright.plugins.emit.base import EmitOptions
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.steps.planning import CountedSteps, Device, PlannedSteps, StepSeconds
from enginewright.runtime.shared.lowered_program import Step
from enginewright.runtime.shared.progress import silent
from enginewright.runtime.shared.step_costs import StepSizes

from .format_units import FormatUnit, weight_node

CONTEXT = 64
"""Tokens of the request whose next one is timed."""

NANOSECONDS = 1e9


@dataclass(frozen=True)
class FormatSeconds:
    """Nanoseconds of a token.

    Attributes:
        units: of each unit, by its formats.
        fixed: of all else.
    """

    units: tuple[tuple[int, ...], ...]
    fixed: int


class TokenClock:
    """Times a token of a program that isn't there yet.

    Args:
        program: before formats are chosen.
        passes: of the pipeline, from there on.
        recipe: of the search.
        context: of the passes.
        device: as in [budget]: a name that ``optimize plan`` knows.

    Raises TargetError for a device that isn't known.
    """

    def __init__(
        self,
        program: Program,
        passes: Sequence[Pass],
        recipe: Recipe,
        context: PassContext,
        device: str,
    ) -> None:
        (gpu,) = find_devices([device])
        self._program, self._recipe, self._context = program, recipe, context
        target = target_on(gpu=gpu is not None)
        planning, lower = planning_of(target), TARGETS[target].lower
        assert planning is not None and lower is not None, "the device is one that is planned for"
        self._planning, self._lower = planning, lower
        self._passes = [*passes, *left_on(TARGETS[target].emitter.passes(), recipe.passes)]
        self._device = Device(gpu, default_shares())
        self.sizes = StepSizes((1,), (CONTEXT,))

    def time(self, chosen: Recipe) -> tuple[tuple[Step, ...], StepSeconds]:
        """The steps of a recipe's program, and their seconds. Which integers a method would choose changes none."""
        weights = chosen.weights.model_copy(update={"method": "nearest", "gptq": None, "sparsify": None})
        context = replace(self._context, formats=weights, calibration=())
        program = self._program.copy()
        PassManager([p for p in self._passes if p.wanted(context)], context).run(program)
        options = EmitOptions(engines=self._recipe.engines or EnginesSection())
        lowered = self._lower(program, options).program
        engine = partial(engine_seconds, lowered.cache_groups)
        planned = PlannedSteps(CountedSteps(lowered), True, None, CONTEXT, engine)
        return lowered.steps, self._planning.timed(planned, self._device, self.sizes, silent)


def time_formats(
    clock: TokenClock,
    units: Sequence[FormatUnit],
    applied: Callable[[Sequence[int]], Recipe],
    on_progress: Callable[[int, int, str], None],
) -> FormatSeconds:
    """Times each format of each unit: one program for each format, with it wherever it can be, else the smallest.

    Args:
        clock: see there.
        units: whose formats are timed.
        applied: gives the recipe of a choice, by the index of each unit's format.
        on_progress: called with how many formats are done, of how many, and the next.
    """
    formats = list(dict.fromkeys(f for unit in units for f in unit.formats))
    owner = {str(weight_node(n).target): i for i, unit in enumerate(units) for n in unit.nodes}
    found = [[0] * len(unit.formats) for unit in units]
    others: list[int] = []
    changed: list[list[tuple[int, int]]] = []
    for done, weight_format in enumerate(formats):
        on_progress(done, len(formats), f"timing {weight_format}")
        chosen = [u.formats.index(weight_format) if weight_format in u.formats else u.smallest for u in units]
        steps, seconds = clock.time(applied(chosen))
        own = [0.0] * len(units)
        other = seconds.around
        for step, taken in zip(steps, seconds.steps, strict=True):
            reads = {i for o in step.inputs if o.kind == "weight" for i in _owners(o.name, owner)}
            if not reads:
                other += taken
            for i in reads:
                own[i] += taken / len(reads)
        others.append(round(other * NANOSECONDS))
        places = [(i, o) for i, o in enumerate(chosen) if units[i].formats[o] == weight_format]
        changed.append(places)
        for i, o in places:
            found[i][o] = round(own[i] * NANOSECONDS)
    fixed = min(others)
    for other, places in zip(others, changed, strict=True):
        for i, o in places:
            found[i][o] += (other - fixed) // len(places)
    return FormatSeconds(tuple(tuple(of) for of in found), fixed)


def _owners(weight: str, owner: dict[str, int]) -> set[int]:
    """The units whose weight a lowered program has under that name, or a part of it: ``NAME.int4``, ``NAME.scales``."""
    while weight not in owner:
        weight, dot, _ = weight.rpartition(".")
        if not dot:
            return set()
    return {owner[weight]}
