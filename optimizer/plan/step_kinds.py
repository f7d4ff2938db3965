"""The steps of a lowered program by kind: layers repeat, so that a program of some hundred steps has a dozen kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

from enginewright.runtime.shared.lowered_program import LoweredProgram, Operand, Step
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, step_costs


@dataclass(frozen=True)
class StepKind:
    """Steps that do the same to operands of the same sizes: the first of them, and how many there are.

    ``key``: equal for equal kinds, also of different programs.
    """

    step: Step
    count: int
    key: Hashable


class CountedSteps:
    """A program's kinds of steps, and what each costs. ``keys``: of the kind of each step."""

    def __init__(self, program: LoweredProgram) -> None:
        self.program = program
        weights = {use.name: use for use in program.weights}
        groups = {group.name: group for group in program.cache_groups}

        def signature(operand: Operand) -> Hashable:
            of: Hashable = None
            if operand.kind == "weight":
                use = weights[operand.name]
                of = use.dtype, use.shape, use.layout
            elif operand.kind == "cache":
                g = groups[operand.name.rpartition("/")[0]]
                of = g.name, g.kv_heads, g.key_head_size, g.value_head_size, g.window, g.dtype
            elif operand.kind == "input":
                of = operand.name
            return operand.kind, operand.dtype, operand.shape, operand.strides, of

        def key(step: Step) -> Hashable:
            operands = tuple(map(signature, step.inputs)), tuple(map(signature, step.outputs))
            return step.op, tuple(sorted(step.attrs.items())), operands

        self.keys = tuple(map(key, program.steps))
        counts, first = Counter(self.keys), dict(zip(reversed(self.keys), reversed(program.steps), strict=True))
        self.kinds = tuple(StepKind(first[k], n, k) for k, n in counts.items())
        self._once = program.model_copy(update={"steps": tuple(kind.step for kind in self.kinds)})
        self.costs = lru_cache(1024)(self._costs)
        self.total = lru_cache(1024)(self._total)

    def _costs(self, sizes: StepSizes) -> tuple[StepCost, ...]:
        """Of one step of each kind."""
        return tuple(step_costs(self._once, sizes))

    def _total(self, sizes: StepSizes) -> StepCost:
        """Of all steps of the program together."""
        pairs = zip(self.kinds, self.costs(sizes), strict=True)
        return sum((cost.times(kind.count) for kind, cost in pairs), StepCost())
