"""The base class of passes: a pass states what it requires and ensures, and rewrites; ``run`` checks both, always."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, final

import torch
from torch.fx.node import Node, Target

from enginewright.passes.ir.code_files import CodeFiles
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.recovered import RecoveredWeights
from enginewright.runtime.shared.errors import PassError

from .pass_options import PassOptions
from .records import Metric as Metric
from .records import Rejection as Rejection
from .verify_program import verify_program


@dataclass(frozen=True)
class Condition:
    """A condition on a program. ``check`` returns the reasons why it doesn't hold; none if it holds."""

    name: str
    check: Callable[[Program], Sequence[str]]


@dataclass(frozen=True)
class PassContext:
    """The options and resources of an export that passes may use.

    Attributes:
        required: names of passes that must match at least once.
        recipe: the recipe's options for passes, with the export's values for options that were left open.
        calibration: token ids of some sequences, [S] int32 each, for passes that evaluate the model.
        scratch: a folder for results of passes that evaluate the model, if they don't fit into memory. It is deleted
            when the export ends; None if results stay in memory.
        code_files: files for the codes of rounded weights, in such a folder; None if a weight is rounded at each
            evaluation.
        memory_budget: the most additional bytes of memory that a pass that evaluates the model may use; None for no
            limit.
        recovered: trained weights that replace the source's; None without training.
        common_formats: True if a target of the export supports only the formats that every target does.
        latent_caches: True if all targets of the export have caches whose values are a part of their keys.
        progress: called with the progress of a long pass: steps done, total steps, and the module's path.
    """

    required: frozenset[str] = frozenset()
    recipe: PassOptions = field(default_factory=PassOptions)
    calibration: tuple[torch.Tensor, ...] = ()
    scratch: Path | None = None
    code_files: CodeFiles | None = None
    memory_budget: int | None = None
    recovered: RecoveredWeights | None = None
    common_formats: bool = False
    latent_caches: bool = False
    progress: Callable[[int, int, str], None] = field(default=lambda done, total, detail: None)


@dataclass
class PassResult:
    """The result of ``Pass.call``.

    Attributes:
        matched: the number of changed places.
        rejected: the candidates that weren't changed, with the reasons.
        metrics: measurements for the export's report.
    """

    matched: int = 0
    rejected: list[Rejection] = field(default_factory=list)
    metrics: list[Metric] = field(default_factory=list)


@dataclass(frozen=True)
class PassRecord:
    """The record of a pass's run, for the bundle's manifest (without ``seconds``) and for the report.

    ``nodes_before`` and ``nodes_after`` are the numbers of nodes in the graph. ``parameters_removed`` is the number
    of weight values that a pass with ``reshapes`` removed; otherwise 0.
    """

    name: str
    matched: int
    rejected: tuple[Rejection, ...]
    nodes_before: int
    nodes_after: int
    seconds: float
    metrics: tuple[Metric, ...] = ()
    parameters_removed: int = 0


class Pass(ABC):
    """A rewrite of a Program in place. Subclasses define ``name``, ``requires``, ``ensures`` and ``call``.

    Attributes:
        name: the pass's name.
        after: for a pass of another package, the pass after which it runs; the pipeline lists all others in order.
        exact: True if the pass changes results only by rounding. The errors of other passes must be within the recipe's
            budget.
        reshapes: True if the pass makes a different model, as pruning does. Then its result is the reference of later
            passes, and parameters are counted again.
        repairs: True if the pass compensates for losses of earlier passes. Those are then not checked against the
            budget one by one.
        requires, ensures: conditions that hold before and after the pass.
    """

    name: ClassVar[str]
    after: ClassVar[str] = "lower_attention"
    exact: ClassVar[bool] = True
    reshapes: ClassVar[bool] = False
    repairs: ClassVar[bool] = False
    requires: ClassVar[tuple[Condition, ...]] = ()
    ensures: ClassVar[tuple[Condition, ...]] = ()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "run" in cls.__dict__:
            raise TypeError(f"{cls.__name__} overrides run, which checks what a pass requires and ensures")

    def wanted(self, context: PassContext) -> bool:
        """Returns True if the export needs the pass; otherwise it is neither run nor measured."""
        return True

    def needs_tokens(self, context: PassContext) -> bool:
        """Returns True if the pass needs calibration tokens with the options in ``context``.

        The export calls it before it has tokens, and samples some if a pass needs them.
        """
        return False

    @abstractmethod
    def call(self, program: Program, context: PassContext) -> PassResult:
        """Rewrites ``program`` in place."""

    @final
    def run(self, program: Program, context: PassContext) -> PassRecord:
        """Checks the requirements, calls the pass, removes dead code, and verifies the result.

        Raises:
            PassError: calibration tokens are needed and there are none, a requirement doesn't hold, the program is
                invalid afterwards or lacks what the pass ensures, or a required pass matched nothing.
        """
        start = time.perf_counter()
        if not context.calibration and self.wanted(context) and self.needs_tokens(context):
            raise PassError(
                f"the pass {self.name} has no calibration tokens",
                hint="Calibrate the export: see docs/use/calibration.md.",
            )
        self._check(program, self.requires, "requires")
        before, parameters = len(program.graph.nodes), _parameters(program) if self.reshapes else 0
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
            tuple(result.metrics),
            parameters - _parameters(program) if self.reshapes else 0,
        )

    def _check(self, program: Program, conditions: Sequence[Condition], verb: str) -> None:
        for condition in conditions:
            if reasons := condition.check(program):
                shown = "; ".join(list(reasons)[:5])
                raise PassError(f"the pass {self.name} {verb} {condition.name!r}, which doesn't hold: {shown}")


def _parameters(program: Program) -> int:
    return sum(math.prod(program.weights[name].shape) for name in program.weights)


def free_of(*targets: Target, name: str) -> Condition:
    """Returns the condition that the program has no call of these ops."""

    def check(program: Program) -> list[str]:
        return [describe_node(n) for n in program.nodes_of(*targets)]

    return Condition(name, check)


def contains(*targets: Target, name: str) -> Condition:
    """Returns the condition that the program has at least one call of these ops."""

    def check(program: Program) -> list[str]:
        return [] if program.nodes_of(*targets) else [f"no {' or '.join(str(t) for t in targets)} in the program"]

    return Condition(name, check)


def describe_node(node: Node) -> str:
    """Returns a node's description for errors: "aten.erf.default at model.layers.0.mlp (node erf_3)"."""
    where = ", ".join(node.meta.get("where", ())) or "the model"
    return f"{node.target} at {where} (node {node.name})"
