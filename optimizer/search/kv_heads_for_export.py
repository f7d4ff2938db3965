"""The search for numbers of heads within an export: which tokens it looks at, and which ones its choice is held to."""

from __future__ import annotations

from enginewright.optimizer.capture import CapturedModel
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.shared.progress import Progress
from enginewright.optimizer.verify.held_out import held_out
from enginewright.passes.framework.base import PassContext

from .search_kv_heads import HeadsChoice, choose_heads


def choose_heads_for_export(
    captured: CapturedModel, recipe: Recipe, context: PassContext, progress: Progress
) -> HeadsChoice:
    """Chooses the heads of a recipe whose [attention] has a budget; see ``choose_heads``.

    Layers are measured with every second calibration sequence, and the others are for the check. That looks at the
    package's text too, and at the very random tokens of the bundle's verification, which holds all to the budget.

    Args:
        captured: the model; its program is left as it is.
        recipe: says the budget.
        context: of the passes; its calibration is at least two sequences.
        progress: told the stage "heads".

    Raises:
        RequestError: there are too few sequences.
        VerificationError, RecipeError: see ``choose_heads``.
    """
    own, checks = held_out(captured, context.calibration, "attention")
    return choose_heads(captured.program, recipe, captured.model_info.parameters, own, checks, context, progress)
