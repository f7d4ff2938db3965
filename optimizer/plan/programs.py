"""The programs that are planned for: a bundle's, or those that recipes would make of a model, without its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from enginewright.optimizer.recipes.recipe import Recipe, list_recipes, load_recipe
from enginewright.optimizer.shared.progress import Progress, silent
from enginewright.plugins.shared.contracts import ModelInfo
from enginewright.plugins.shared.errors import BundleError, MissingDependencyError
from enginewright.plugins.shared.lowered_program import LoweredProgram
from enginewright.runtime.bundle.manifest import MANIFEST_PATH
from enginewright.runtime.bundle.reader import Bundle


@dataclass(frozen=True)
class PlannedProgram:
    """What recipes make of a model.

    Attributes:
        recipes: names of those that make the same program, but for the numbers in its weights.
        program: with memory planned; None where it can't be known without the weights.
        formats: of weights that GPUs need hardware for: "fp8", "int4", "bf16".
        omitted: why a recipe has no program.
    """

    recipes: tuple[str, ...]
    program: LoweredProgram | None
    formats: frozenset[str] = frozenset()
    omitted: str = ""


@dataclass(frozen=True)
class PlannedModel:
    """A model with its programs."""

    info: ModelInfo
    programs: tuple[PlannedProgram, ...]


def planned_model(source: str | Path, recipes: Sequence[str | Path], progress: Progress = silent) -> PlannedModel:
    """Of a bundle what it has; of a model what recipes would make of it.

    Args:
        source: a bundle's folder; or a model's folder, of which config.json is enough, a GGUF file, or a Hub id.
        recipes: of a model: names or TOML files; none are all built-in ones.
        progress: called with stages of an export.

    Raises:
        BundleError: the bundle has no lowered program, or recipes are named beside it.
        SourceError, UnsupportedModelError, RecipeError, MissingDependencyError: as for an export.
    """
    if (Path(source) / MANIFEST_PATH).is_file():
        return _of_bundle(Bundle.open(source), recipes)
    chosen = [load_recipe(name) for name in recipes] or list_recipes()
    with MissingDependencyError.of_export("planning for a model that wasn't exported yet"):
        from .model_programs import programs_of_model
    return PlannedModel(*programs_of_model(source, chosen, progress))


def _of_bundle(bundle: Bundle, recipes: Sequence[str | Path]) -> PlannedModel:
    if recipes:
        raise BundleError(
            f"{bundle.path} is a bundle, which has the recipe that it was exported with",
            hint="Leave --recipe out, or pass the model that it was made from.",
        )
    name = "cpu" if "cpu" in bundle.programs else next(iter(bundle.programs), None)
    if name is None:
        there = ", ".join(sorted(bundle.targets)) or "none"
        raise BundleError(
            f"{bundle.path}: none of the bundle's targets ({there}) has a lowered program, which plans are made from",
            hint="Export the model with --target cpu as well, or plan for the model itself.",
        )
    program = bundle.programs[name]
    recipe = str(bundle.manifest.recipe.get("name") or "")
    return PlannedModel(bundle.model, (PlannedProgram((recipe,), program, formats_of(program)),))


_FORMATS = {"fp8": "fp8", "i4": "int4", "u4": "int4", "bf16": "bf16"}


def formats_of(program: LoweredProgram) -> frozenset[str]:
    """Of its weights and caches, those that not every GPU has."""
    types = [use.dtype for use in program.weights] + [group.dtype for group in program.cache_groups]
    return frozenset(_FORMATS[t] for t in types if t in _FORMATS)


def undecided(recipe: Recipe) -> str:
    """Why nobody can say without the weights what a recipe makes of a model; "" if its configuration says it all."""
    if recipe.searched:
        return "a search over the weights decides its formats or shapes"
    if recipe.prune is not None or recipe.attention is not None:
        return "it takes parts of the model out"
    if recipe.sparse:
        return "which weights it keeps is for their values to say"
    return ""
