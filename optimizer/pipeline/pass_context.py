"""The facts about an export that passes may use, from its recipe: equal for exports, repetitions and recoveries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.targets import TARGETS
from enginewright.passes.framework.base import PassContext
from enginewright.passes.ir.code_files import CodeFiles
from enginewright.passes.ir.recovered import RecoveredWeights
from enginewright.runtime.shared.kv_formats import KV_FORMATS
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

from .pipeline import choose_passes, left_on


@dataclass(frozen=True)
class Recovered:
    """A recovery whose weights passes use.

    Attributes:
        weights: the trained weights.
        recipe: the recipe by which the weights got their shapes, formats and pruned channels; None if it is the
            export's.
    """

    weights: RecoveredWeights
    recipe: Recipe


def pass_context(
    recipe: Recipe,
    required: frozenset[str],
    calibration: Sequence[torch.Tensor],
    *,
    scratch: Path | None,
    progress: Progress,
    code_files: CodeFiles | None = None,
    memory_budget: int | None = None,
    recovered: Recovered | None = None,
    targets: Sequence[str] = (),
) -> PassContext:
    """Returns the context of all passes of an export by ``recipe``. Other arguments are the fields of ``PassContext``.

    Args:
        recipe: the recipe.
        required: the names of passes that must match something.
        calibration: token ids, [S] each.
        scratch: a folder for computed weights.
        progress: called with the stage "layers".
        code_files: files for the codes of rounded weights.
        memory_budget: the most bytes of memory to use; None for no limit.
        recovered: trained weights; None without a recovery.
        targets: all targets of the export, whose limits the passes respect; () for a program that isn't lowered.
    """
    shapes = recipe if recovered is None else recovered.recipe
    cache = recipe.kv_cache.model_copy(update={"dtype": recipe.kv_cache.dtype or KV_FORMATS[recipe.cache].name})
    options = {"prune": shapes.pruning, "attention": shapes.attention, "kv_cache": cache}
    return PassContext(
        required=required,
        recipe=recipe.model_copy(update=options),
        calibration=tuple(calibration),
        scratch=scratch,
        code_files=code_files,
        memory_budget=memory_budget,
        common_formats=not all(TARGETS[name].every_format for name in targets),
        latent_caches=bool(targets) and all(TARGETS[name].latent_caches for name in targets),
        recovered=None if recovered is None else recovered.weights,
        progress=lambda done, of, where: progress(ProgressEvent("layers", done, of, where)),
    )


def needs_tokens(recipe: Recipe, targets: Sequence[str]) -> bool:
    """Returns True if an export needs calibration tokens: for one of its passes, or for a search for shapes.

    It asks every pass of the export: ours, those of other packages that the recipe turns on, and those of ``targets``.
    Raises PassError if a pass of another package has no place, TargetError if one can't be loaded.
    """
    context = pass_context(recipe, frozenset(), (), scratch=None, progress=silent, targets=targets)
    passes = choose_passes(recipe.passes)[0]
    for target in targets:
        passes += left_on(TARGETS[target].emitter.passes(), recipe.passes)
    searched = bool(recipe.shares) or recipe.kv_cache.searched
    return searched or any(one.wanted(context) and one.needs_tokens(context) for one in passes)
