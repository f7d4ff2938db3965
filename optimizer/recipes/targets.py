"""The requirements of a recipe on the targets that it names, checked before any work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.program import Program
from enginewright.passes.recurrence.lower_recurrence import FORMS
from enginewright.plugins.emit.target import Target
from enginewright.plugins.gpu.formats import check_formats
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.runtime.shared.errors import RecipeError, TargetError, UnsupportedModelError
from enginewright.runtime.shared.kv_formats import CACHES, ROTATED_CACHES, SCALED_CACHES
from enginewright.runtime.shared.targets import OWN, Halves

from .recipe import Recipe

TARGETS = Halves("compile.target", Target)
"""Name of a target -> its compiling half; targets of other packages come last."""


def check_kernels(recipe: Recipe, targets: Sequence[str]) -> None:
    """Raises TargetError naming a target that doesn't support the recipe's weight formats, KV cache, attention or
    exactness.
    """
    check_formats_of(recipe, targets)
    check_cache(recipe, targets)
    check_context(recipe, targets)
    check_exact(recipe, targets)


def check_formats_of(recipe: Recipe, targets: Sequence[str]) -> None:
    """Raises TargetError naming the target that has no kernels for a weight format of the recipe."""
    for weight_format, key in _formats(recipe):
        lacking = [name for name in targets if not (weight_format.everywhere or TARGETS[name].every_format)]
        if lacking:
            raise TargetError(
                f"target {lacking[0]}: it has no kernels for {weight_format}, which recipe {recipe.name} has in {key}",
                hint="Give it another format there, or export for --target cpu alone.",
            )


def check_storages(recipe: Recipe, targets: Sequence[str]) -> None:
    """Raises TargetError naming the target or the GPU that lacks a weight format of the recipe.

    GPUs that engines can't be built for at all are refused here, too.
    """
    check_formats_of(recipe, targets)
    keys = {weight_format.storage: key for weight_format, key in _formats(recipe)}
    for target in (TARGETS[name] for name in targets):
        if target.gpus:
            engines = recipe.engines or EnginesSection()
            gpus = engines.gpus or target.gpus
            target.check_gpus(gpus)
            needed = [storage for storage in target.instructions if storage in keys]
            caches = [name for name in target.cache_instructions if name in recipe.kv_cache.named.values()]
            check_formats(gpus, (engines.dtype or target.floats, *needed, *caches))


def check_cache(recipe: Recipe, targets: Sequence[str]) -> None:
    """Raises TargetError naming a target that doesn't support a KV-cache format of the recipe, and the key of it.

    No format, or f32, suits all targets: they then store keys and values in the type of their computation.
    """
    engines = recipe.engines or EnginesSection()
    each = recipe.kv_cache.searched or bool(recipe.kv_cache.overrides)
    for name in (n for n in targets if not TARGETS[n].narrow_caches):
        for key, dtype in recipe.kv_cache.named.items():
            if (dtype == "f32" and not each) or CACHES[dtype] in TARGETS[name].caches(engines):
                continue
            reason = TARGETS[name].no_cache if CACHES[dtype] in SCALED_CACHES else ""
            why = f": {reason}" if reason else ""
            raise TargetError(
                f"target {name}: it has no KV cache of {dtype}, which recipe {recipe.name} asks for ({key}){why}",
                hint="Leave dtype out of [kv_cache], or --kv-cache out, for it; --target cpu has such a cache.",
            )
        if each:
            key = "kv_cache.dtype auto" if recipe.kv_cache.searched else "kv_cache.overrides"
            raise TargetError(
                f"target {name}: all layers have one KV-cache format there, and recipe {recipe.name} has {key}",
                hint="Name one format in kv_cache.dtype, or export for --target cpu alone.",
            )


def check_context(recipe: Recipe, targets: Sequence[str]) -> None:
    """Raises TargetError naming a target whose attention doesn't support the recipe's [adaptive_context]."""
    lacking = [name for name in targets if not TARGETS[name].adaptive_context]
    if recipe.adaptive_context is not None and {*recipe.caches} & {*ROTATED_CACHES}:
        raise TargetError(
            f"recipe {recipe.name}: [adaptive_context] chooses blocks by channels of keys, which a KV cache of "
            f"{' and '.join(dict.fromkeys(c for c in recipe.caches if c in ROTATED_CACHES))} mixes",
            hint="Use kv_cache.dtype int8 with [adaptive_context].",
        )
    if lacking and recipe.adaptive_context is not None:
        raise TargetError(
            f"target {lacking[0]}: its attention looks at the whole context, and recipe {recipe.name} has "
            "[adaptive_context]",
            hint="Leave that section out for it, or export for --target cpu alone.",
        )


def check_exact(recipe: Recipe, targets: Sequence[str]) -> None:
    """Raises TargetError naming a target that doesn't support ``exact`` of [engines], if the recipe sets it."""
    lacking = [name for name in targets if not TARGETS[name].exact]
    if lacking and recipe.engines is not None and recipe.engines.exact:
        able = ", ".join(name for name in OWN if TARGETS[name].exact)
        raise TargetError(
            f"target {lacking[0]}: recipe {recipe.name} has engines.exact, which target {able} alone supports",
            hint=f"Leave exact out of [engines], or export for --target {able} alone. Target cpu is exact without it.",
        )


def check_layers(program: Program, targets: Iterable[str]) -> None:
    """Checks that the targets have kernels for all layers of a captured program.

    Args:
        program: the program as captured.
        targets: the names of the targets.

    Raises:
        UnsupportedModelError: a layer is recurrent, and a target has no kernels for its state. The error names both.
    """
    recurrent = program.nodes_of(*FORMS)
    for name in targets:
        if recurrent and not TARGETS[name].states:
            layer = bound_arguments(recurrent[0])["layer"]
            able = ", ".join(other for other in OWN if TARGETS[other].states)
            raise UnsupportedModelError(
                f"layer {layer} of the model is recurrent, and target {name} has no kernels for its state",
                hint=f"Targets with such kernels: {able}.",
            )


_OF_DECODERS = ("auto", "prune", "attention", "adaptive_context", "buckets")
"""Sections of recipes that search by logits or change caches."""


def check_pooled(task: str, recipe: Recipe, targets: Iterable[str]) -> None:
    """Checks that a model that computes whole texts can be exported by a recipe for targets.

    Args:
        task: the model's task, for the message.
        recipe: the recipe.
        targets: the names of the targets.

    Raises:
        UnsupportedModelError: a target has no kernels for attention without a cache.
        RecipeError: the recipe has a section for models that generate text.
    """
    for name in targets:
        if not TARGETS[name].whole_texts:
            able = ", ".join(other for other in OWN if TARGETS[other].whole_texts)
            raise UnsupportedModelError(
                f"this is a model for {task}, and target {name} has no kernels for attention without a cache",
                hint=f"Targets with such kernels: {able}.",
            )
    if recipe.kv_cache.searched:
        raise RecipeError(
            f"recipe {recipe.name}: kv_cache.dtype auto is for models that generate text, and this is a model for "
            f"{task}",
            hint="Leave [kv_cache] out.",
        )
    for section in _OF_DECODERS:
        if getattr(recipe, section) is not None:
            raise RecipeError(
                f"recipe {recipe.name}: [{section}] is for models that generate text, and this is a model for {task}",
                hint="Leave the section out.",
            )


def _formats(recipe: Recipe) -> Iterable[tuple[WeightFormat, str]]:
    """Yields every weight format of the recipe with its key; candidates and overrides first, the defaults last."""
    weights = recipe.weights
    for i, candidate in enumerate((recipe.auto.candidates or ()) if recipe.auto is not None else ()):
        yield candidate, f"auto.candidates.{i}"
    for i, override in enumerate(weights.overrides):
        yield override.format, f"weights.overrides.{i}.format"
    if weights.embeddings is not None:
        yield weights.embeddings, "weights.embeddings"
    yield weights.default, "weights.default"
