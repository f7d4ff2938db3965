"""Makes the program to train of a model and a recipe: the passes of an export, applied to weights that can change."""

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
    """The module and the weights that a recovery trains.

    Attributes:
        module: the module. Its parameters are the model's weights after the passes that change shapes.
        weights: the same weights, each with the expression that it replaces.
        metrics: the measurements of these passes.
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
    """Runs the common passes of an export, without the lowering of attention, and returns the program with gradients.

    Args:
        captured: the captured model; its program isn't changed.
        recipe: a recipe with the method nearest, or with [auto], whose formats are chosen after the training; see
            ``check_recipe``.
        calibration: token ids, [S] each, for passes that read values of the model.
        scratch: a folder for computed weights; see ``PassContext``.
        progress: called with the stage "passes".

    Raises:
        RecipeError, PassError: as for the passes of an export.
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
