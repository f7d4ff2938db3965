"""From a model and a recipe to the program that is trained: the passes of an export, on weights that can move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from enginewright.optimizer.capture import CapturedModel
from enginewright.optimizer.pipeline.pass_context import Recovered, pass_context
from enginewright.optimizer.pipeline.pipeline import choose_passes
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.framework.base import Metric
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from .trainable import MovingWeights, TrainableProgram


@dataclass(frozen=True)
class Prepared:
    """The module and weights that a recovery trains.

    Attributes:
        module: its parameters are the model's weights after the recipe's passes that change shapes.
        weights: the same weights, each with the expression that it stands for.
        metrics: measurements of these passes.
    """

    module: TrainableProgram
    weights: MovingWeights
    metrics: tuple[Metric, ...]


def prepare(
    captured: CapturedModel,
    recipe: Recipe,
    calibration: Sequence[torch.Tensor],
    *,
    scratch: Path | None,
    progress: Progress,
) -> Prepared:
    """Runs an export's common passes but for the lowering of attention, and gives the program gradients.

    Args:
        captured: its program stays as it is.
        recipe: with the method nearest, or with [auto], which says formats behind the training; see ``check_recipe``.
        calibration: token ids, [S] each, for passes that look at what the model computes.
        scratch: see ``PassContext``.
        progress: called with the stage "passes".

    Raises what an export's passes raise.
    """
    passes, required = choose_passes(recipe.passes)
    weights, program = MovingWeights(), captured.program.copy()
    rounded = recipe if recipe.auto is None else recipe.model_copy(update={"weights": WeightFormats()})
    context = pass_context(
        rounded,
        required,
        calibration,
        scratch=scratch,
        progress=progress,
        recovered=Recovered(weights, recipe),
    )
    some = [p for p in passes if not isinstance(p, LowerAttention) and p.wanted(context)]
    done = [0]

    def after(program: object, record: object) -> None:
        done[0] += 1
        progress(ProgressEvent("passes", done[0], len(some)))

    records = PassManager(some, context, after).run(program)
    return Prepared(TrainableProgram(program, weights), weights, tuple(f for r in records for f in r.metrics))
