"""Measures the time of a token of a finished bundle, if the recipe's budget limits it."""

from __future__ import annotations

from enginewright.optimizer.bench.token_seconds import token_seconds
from enginewright.optimizer.plan.token_clock import CONTEXT
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.search.formats import TIMES_AGREE
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import VerificationError
from enginewright.runtime.shared.targets import PROCESSOR


def check_time(bundle: Bundle, target: str, recipe: Recipe) -> float | None:
    """Measures the milliseconds of a token, if the recipe's budget has a time on this machine; None otherwise."""
    most = recipe.budget.max_ms_per_token
    if most is None or recipe.budget.device not in (None, PROCESSOR):
        return None
    duration = 1e3 * token_seconds(bundle, target, CONTEXT)
    if duration > (1 + TIMES_AGREE) * most:
        raise VerificationError(
            f"recipe {recipe.name}: a token takes {duration:.3g} ms on this machine, and max_ms_per_token is {most:g}",
            hint="Export it while nothing else runs; or take a recipe of faster formats, or allow more with "
            "max_ms_per_token in [budget].",
        )
    return duration
