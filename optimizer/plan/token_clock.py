"""Times a token, which is a decode step of one request, for a program that isn't in a bundle yet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from enginewright.optimizer.pipeline.pipeline import left_on
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.targets import TARGETS
from enginewright.passes.framework.base import Pass, PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.ir.program import Program
from enginewright.plugins.emit.base import EmitOptions
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.steps.planning import CountedSteps, Device, PlannedSteps, StepSeconds
from enginewright.runtime.shared.lowered_program import Step
from enginewright.runtime.shared.step_costs import StepSizes
from enginewright.runtime.shared.targets import PROCESSOR

from .devices import default_shares, find_devices
from .engine_seconds import engine_seconds
from .programs import planning_of, target_on

CONTEXT = 64
"""The tokens of the request at the timed decode step."""


class TokenClock:
    """Times programs on this machine with random weights, or predicts the times for a GPU.

    Args:
        recipe: the recipe, whose [budget] names the device, and whose [passes] turn passes of the target off.

    Raises:
        TargetError: the device isn't known.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.device = recipe.budget.device or PROCESSOR
        (gpu,) = find_devices([self.device])
        target = target_on(gpu=gpu is not None)
        planning, lower = planning_of(target), TARGETS[target].lower
        assert planning is not None and lower is not None, "the device is one that is planned for"
        self._planning, self._lower = planning, lower
        self._passes = left_on(TARGETS[target].emitter.passes(), recipe.passes)
        self._options = EmitOptions(engines=recipe.engines or EnginesSection())
        self._device = Device(gpu, default_shares())

    def time(
        self, program: Program, passes: Sequence[Pass], context: PassContext
    ) -> tuple[tuple[Step, ...], StepSeconds]:
        """Returns the steps of a program after some passes and the target's lowering, and their seconds. No weight is
        read.
        """
        copy = program.copy()
        PassManager([p for p in (*passes, *self._passes) if p.wanted(context)], context).run(copy)
        lowered = self._lower(copy, self._options).program
        engine = partial(engine_seconds, lowered.cache_groups)
        planned = PlannedSteps(CountedSteps(lowered), True, CONTEXT, engine)
        return lowered.steps, self._planning.timed(planned, self._device, StepSizes((1,), (CONTEXT,)))
