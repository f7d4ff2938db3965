"""``auto`` within an export: which tokens it looks at, and which ones its choice is held to."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace

from enginewright.optimizer.capture import CapturedModel
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.shared.progress import Progress
from enginewright.optimizer.shared.storage import StoredBytes
from enginewright.optimizer.verify.held_out import held_out
from enginewright.passes.framework.base import PassContext
from enginewright.plugins.shared.errors import VerificationError

from .search_formats import Choice, choose_automatically

RECIPE_FILE = "report/recipe.toml"
"""In the bundle: what was chosen, to be exported again without a search."""

RECIPE_COMMENT = """What a search chose. To export the same without searching:
optimize export MODEL --recipe report/recipe.toml"""


def choose_for_export(captured: CapturedModel, recipe: Recipe, context: PassContext, progress: Progress) -> Choice:
    """Chooses the formats of a recipe that has [auto]; see ``choose_automatically``.

    Every second calibration sequence is for measuring what formats cost, the others are held out for the check. That
    looks at the package's text too, and at the very random tokens of the bundle's verification, which holds both to the
    budget.

    Args:
        captured: the model; its program is left as it is.
        recipe: says the candidates and the budget; what it changes of the model's shape, it says in numbers.
        context: of the passes; its calibration is at least two sequences.
        progress: told the stage "auto".

    Raises:
        RequestError: there are too few sequences.
        VerificationError, RecipeError: see ``choose_automatically``.
    """
    own, checks = held_out(captured, context.calibration, "auto")
    scratch = None if context.scratch is None else context.scratch / "formats"
    if scratch is not None:
        scratch.mkdir()
    try:
        return choose_automatically(
            captured.program,
            recipe,
            captured.model_info.parameters,
            own,
            checks,
            replace(context, scratch=scratch),
            progress,
        )
    finally:
        if scratch is not None:
            shutil.rmtree(scratch)


def check_bytes(stored: Sequence[StoredBytes], recipe: Recipe) -> None:
    """Raises VerificationError if a bundle's weights take more than the recipe's ``max_bytes``."""
    most, taken = recipe.budget.max_bytes, sum(s.nbytes for s in stored)
    if most is not None and taken > most:
        raise VerificationError(
            f"recipe {recipe.name}: the weights take {taken:,} bytes, and max_bytes is {most:,}",
            hint="Take a recipe of smaller formats, or allow more with max_bytes in [budget].",
        )
