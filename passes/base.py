"""What a pass is: it states what it requires and ensures, and rewrites; ``run`` checks both, and can't be skipped."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

from torch.fx.node import Node, Target

from enginewright.plugins.errors import PassError

from .ir.program import Program
from .verify_program import verify_program
from .weight_formats import WeightFormats


@dataclass(frozen=True)
class Rejection:
    """A candidate that a rule's check turned down: the node, where it is in the model, and why."""

    node: str
    where: str
    reason: str


@dataclass(frozen=True)
class Condition:
    """Something that holds of a program, or not: ``check`` gives the reasons why it doesn't."""

    name: str
    check: Callable[[Program], Sequence[str]]


@dataclass(frozen=True)
class PassContext:
    """What passes may know of the export.

    ``required``: names of passes that must match at least once. ``formats``: what the recipe says of weights.
    """

    required: frozenset[str] = frozenset()
    formats: WeightFormats = field(default_factory=WeightFormats)


@dataclass
class PassResult:
    """What ``call`` reports. ``matched`` counts places changed."""

    matched: int = 0
    rejected: list[Rejection] = field(default_factory=list)


@dataclass(frozen=True)
class PassRecord:
    """What a run of a pass did; goes into the bundle's manifest (without the time) and the report."""

    name: str
    matched: int
    rejected: tuple[Rejection, ...]
    nodes_before: int
    nodes_after: int
    seconds: float


class Pass(ABC):
    """A rewrite of a Program in place. Subclasses give ``name``, ``requires``, ``ensures`` and ``call``."""

    name: ClassVar[str]
    requires: ClassVar[tuple[Condition, ...]] = ()
    ensures: ClassVar[tuple[Condition, ...]] = ()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "run" in cls.__dict__:
            raise TypeError(f"{cls.__name__} overrides run, which checks what a pass requires and ensures")

    @abstractmethod
    def call(self, program: Program, context: PassContext) -> PassResult:
        """Rewrites ``program`` in place."""

    @final
    def run(self, program: Program, context: PassContext) -> PassRecord:
        """Checks, calls, cleans up after and checks again.

        Raises:
            PassError: a requirement doesn't hold, the pass broke the program or what it ensures, or it had to match
                and didn't.
        """
        start = time.perf_counter()
        self._check(program, self.requires, "requires")
        before = len(program.graph.nodes)
        result = self.call(program, context)
        if result.matched:
            program.remove_dead_code()
        verify_program(program, after=self.name)
        self._check(program, self.ensures, "ensures")
        if self.name in context.required and not result.matched:
            reasons = "; ".join(f"{r.node} ({r.where}): {r.reason}" for r in result.rejected[:5])
            raise PassError(
                f"the pass {self.name} is required and matched nothing" + (f": {reasons}" if reasons else ""),
                hint="Switch it off in the recipe, or look at the rejected places in the report.",
            )
        return PassRecord(
            self.name,
            result.matched,
            tuple(result.rejected),
            before,
            len(program.graph.nodes),
            time.perf_counter() - start,
        )

    def _check(self, program: Program, conditions: Sequence[Condition], verb: str) -> None:
        for condition in conditions:
            if reasons := condition.check(program):
                shown = "; ".join(list(reasons)[:5])
                raise PassError(f"the pass {self.name} {verb} {condition.name!r}, which doesn't hold: {shown}")


def free_of(*targets: Target, name: str) -> Condition:
    """The condition that no call of these ops is in the program."""

    def check(program: Program) -> list[str]:
        return [describe_node(n) for n in program.nodes_of(*targets)]

    return Condition(name, check)


def contains(*targets: Target, name: str) -> Condition:
    """The condition that at least one call of these ops is in the program."""

    def check(program: Program) -> list[str]:
        return [] if program.nodes_of(*targets) else [f"no {' or '.join(str(t) for t in targets)} in the program"]

    return Condition(name, check)


def describe_node(node: Node) -> str:
    """A node as errors name it: "aten.erf.default at model.layers.0.mlp (node erf_3)"."""
    where = ", ".join(node.meta.get("where", ())) or "the model"
    return f"{node.target} at {where} (node {node.name})"
