"""Which targets have the KV cache that a recipe may ask for: checked before any work is done."""

from __future__ import annotations

from collections.abc import Sequence

from enginewright.plugins.shared.errors import TargetError

from ..recipes.recipe import Recipe

_ROUNDING = ("cpu",)
"""Targets whose caches may have fewer bits than what they compute with."""


def check_cache(recipe: Recipe, targets: Sequence[str]) -> None:
    """Raises TargetError naming the target that lacks the KV cache that the recipe names.

    A recipe that leaves it open, or says f32, goes with all: they store keys and values as they compute them.
    """
    dtype = recipe.kv_cache.dtype
    lacking = [name for name in targets if name not in _ROUNDING]
    if lacking and dtype not in (None, "f32"):
        raise TargetError(
            f"target {lacking[0]}: it has no KV cache of {dtype}, which recipe {recipe.name} asks for (kv_cache.dtype)",
            hint="Leave dtype out of [kv_cache], or --kv-cache out, for it; --target cpu has such a cache.",
        )
