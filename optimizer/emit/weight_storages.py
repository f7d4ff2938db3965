"""Which GPUs have the weights that a recipe may ask for: checked before any work is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from enginewright.optimizer.recipes.gpus import check_formats
from enginewright.plugins.shared.contracts import Storage

from ..recipes.engine_section import EnginesSection
from ..recipes.recipe import Recipe
from .tensorrt.gpus import KERNELS_FOR, check_kernels
from .tensorrt_rtx.gpus import DEFAULT, check_suited

_ENGINES: dict[str, tuple[str, ...]] = {"tensorrt-rtx": DEFAULT, "tensorrt": KERNELS_FOR}
"""Targets that build for GPUs, and those that they build for where nobody says it."""


def check_storages(recipe: Recipe, targets: Sequence[str]) -> None:
    """Raises TargetError naming the GPU that lacks a format of the recipe.

    GPUs that engines can't be built for at all are refused here, too.
    """
    asked = dict(_asked(recipe))
    for target in targets:
        if target in _ENGINES:
            engines = recipe.engines or EnginesSection()
            gpus = engines.gpus or _ENGINES[target]
            if target == "tensorrt-rtx":
                check_suited(gpus)
            else:
                check_kernels(gpus)
            check_formats(gpus, (engines.dtype, *(storage for storage in ("int4", "fp8") if storage in asked)))


def _asked(recipe: Recipe) -> Iterable[tuple[Storage, str]]:
    """Every storage of weights that the recipe names, with its key; of several keys the plainest comes last."""
    weights = recipe.weights
    for i, candidate in enumerate(recipe.auto.candidates if recipe.auto is not None else ()):
        yield candidate.storage, f"auto.candidates.{i}"
    for i, override in enumerate(weights.overrides):
        yield override.format.storage, f"weights.overrides.{i}.format"
    if weights.embeddings is not None:
        yield weights.embeddings.storage, "weights.embeddings"
    yield weights.default.storage, "weights.default"
