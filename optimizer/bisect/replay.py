"""Repeats an export: captures the source, and rewrites it by the passes of a recipe, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.fx.node import Node, map_arg
from transformers import PreTrainedModel

from enginewright.optimizer.calibration import tokens_of_recipe
from enginewright.optimizer.capture import CapturedModel
from enginewright.optimizer.pipeline.pass_context import Recovered, pass_context
from enginewright.optimizer.pipeline.pipeline import choose_passes, left_on
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.targets import TARGETS
from enginewright.optimizer.recover import FinishedRecovery
from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.progress import Progress, ProgressEvent


@dataclass(frozen=True)
class Stage:
    """The program after a pass.

    Attributes:
        name: the name of the pass; "capture" for the captured program.
        target: the target that the pass belongs to; "" for passes of the common pipeline.
        exact: True if nothing but the order of sums may differ from the stage before: the pass is exact, or changed
            nothing.
        program: a copy of the program.
        reshapes: True if the pass has made another model on purpose.
    """

    name: str
    target: str
    exact: bool
    program: Program
    reshapes: bool = False

    @property
    def label(self) -> str:
        """The stage's name in messages: "the pass fuse_qkv"."""
        if self.name == CAPTURE:
            return "capture"
        return f"the pass {self.name}" + (f" (of target {self.target})" if self.target else "")


CAPTURE = "capture"


def replay(
    source: Path | PreTrainedModel,
    captured: CapturedModel,
    recipe: Recipe,
    target: str,
    *,
    calibration: Path | None,
    recovered: FinishedRecovery | None = None,
    targets: Sequence[str] = (),
    scratch: Path,
    progress: Progress,
) -> list[Stage]:
    """Repeats an export up to the program that a target is lowered from, and returns its stages, the captured one
    first.

    Args:
        source: the captured model, from which calibration tokens are sampled.
        captured: the captured program, which is rewritten.
        recipe: the recipe with the passes and formats.
        target: the target whose passes come last.
        calibration: a file of calibration text, for a recipe that needs tokens; None samples them from the model.
        recovered: the trained weights, for a bundle of a recovery.
        targets: the targets that the bundle was made for; empty without a bundle.
        scratch: a folder for computed weights, which has to exist as long as the stages.
        progress: called with the stages "calibration" and "passes".

    Raises:
        SourceError, UnsupportedModelError, RecipeError, PassError, RequestError: as for an export.
    """
    passes, required = choose_passes(recipe.passes, caches=captured.model_info.pooling is None)
    chosen = [("", p) for p in passes] + [(target, p) for p in left_on(TARGETS[target].emitter.passes(), recipe.passes)]
    program = captured.program
    stages = [Stage(CAPTURE, "", True, program.copy())]
    known = None if recovered is None else recovered.calibration(captured.model_info, calibration)
    tokens = known.sequences if known else tokens_of_recipe(source, captured, recipe, (target,), calibration, progress)
    trained = None if recovered is None else Recovered(recovered.weights(), recovered.recipe)
    context = pass_context(
        recipe,
        required,
        tokens,
        scratch=scratch,
        progress=progress,
        recovered=trained,
        targets=targets or (target,),
    )
    for done, (owner, one) in enumerate(chosen, 1):
        record = one.run(program, context)
        exact = one.exact or same_program(stages[-1].program, program)
        stages.append(Stage(one.name, owner, exact, program.copy(), one.reshapes and record.matched > 0))
        progress(ProgressEvent("passes", done, len(chosen), one.name))
    return stages


def same_program(a: Program, b: Program) -> bool:
    """Returns True if two programs have the same calls of the same weights, in the same order.

    It may return False for programs that are equal.
    """
    if a.graph is b.graph:
        return True
    first, second = list(a.graph.nodes), list(b.graph.nodes)
    numbers = {node: i for nodes in (first, second) for i, node in enumerate(nodes)}

    def calls(nodes: list[Node]) -> list[object]:
        return [(n.op, n.target, *map_arg((n.args, n.kwargs), lambda x: ("node", numbers[x]))) for n in nodes]

    names = list(a.weights)
    return (
        len(first) == len(second)
        and names == list(b.weights)
        and all(a.weights[name] is b.weights[name] for name in names)
        and a.cache_groups == b.cache_groups
        and calls(first) == calls(second)
    )
