"""The programs that are planned for: a bundle's, or those that recipes would make of a model, without its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from enginewright.optimizer.capture.check_source import check_source
from enginewright.optimizer.recipes.recipe import Recipe, list_recipes, load_recipe
from enginewright.plugins.cuda.section import CudaSection
from enginewright.runtime.bundle.manifest import MANIFEST_PATH
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import BundleError, MissingDependencyError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.progress import Progress, loading, silent

CPU_TARGET, GPU_TARGET = "cpu", "cuda"
"""Whose programs are planned with: on this machine, and on GPUs."""


@dataclass(frozen=True)
class PlannedProgram:
    """What recipes make of a model.

    Attributes:
        recipes: names of those that make the same program, but for the numbers in its weights.
        program: with memory planned; None where it can't be known without the weights.
        target: whose program it is.
        formats: of weights that GPUs need hardware for: "fp8", "int4", "bf16".
        omitted: why a recipe has no program.
        mixed_decodes: of the target cuda: see ``plugins.cuda.section.CudaSection``.
    """

    recipes: tuple[str, ...]
    program: LoweredProgram | None
    formats: frozenset[str] = frozenset()
    omitted: str = ""
    target: str = CPU_TARGET
    mixed_decodes: bool = False


@dataclass(frozen=True)
class PlannedModel:
    """A model with its programs."""

    info: ModelInfo
    programs: tuple[PlannedProgram, ...]

    def programs_on(self, *, gpu: bool) -> tuple[PlannedProgram, ...]:
        """Those that a GPU runs: the cuda target's, in the place of which another's may stand; or this machine."""
        cuda = tuple(p for p in self.programs if p.target == GPU_TARGET)
        others = tuple(p for p in self.programs if p.target != GPU_TARGET)
        return (cuda or others) if gpu else others


def planned_model(
    source: str | Path,
    recipes: Sequence[str | Path],
    progress: Progress = silent,
    targets: Sequence[str] = (CPU_TARGET,),
) -> PlannedModel:
    """Of a bundle what it has; of a model what recipes would make of it.

    Args:
        source: a bundle's folder; or a model's folder, of which config.json is enough, a GGUF file, or a Hub id.
        recipes: of a model: names or TOML files; none are all built-in ones.
        progress: called with stages of an export.
        targets: of a model: whose programs are wanted, of ``CPU_TARGET`` and ``GPU_TARGET``.

    Raises:
        BundleError: the bundle has no lowered program, or recipes are named beside it.
        SourceError, UnsupportedModelError, RecipeError, MissingDependencyError: as for an export.
    """
    if (Path(source) / MANIFEST_PATH).is_file():
        return _of_bundle(Bundle.open(source), recipes)
    chosen = [load_recipe(name) for name in recipes] or list_recipes()
    check_source(source)
    loading(progress)
    with MissingDependencyError.of_export("planning for a model that wasn't exported yet"):
        from .model_programs import programs_of_model
    return PlannedModel(*programs_of_model(source, chosen, progress, targets))


def _of_bundle(bundle: Bundle, recipes: Sequence[str | Path]) -> PlannedModel:
    if recipes:
        raise BundleError(
            f"{bundle.path} is a bundle, which has the recipe that it was exported with",
            hint="Leave --recipe out, or pass the model that it was made from.",
        )
    here = [name for name in bundle.programs if name != GPU_TARGET]
    names = [CPU_TARGET] if CPU_TARGET in here else here[:1]
    names += [GPU_TARGET] if GPU_TARGET in bundle.programs else []
    if not names:
        there = ", ".join(sorted(bundle.targets)) or "none"
        raise BundleError(
            f"{bundle.path}: none of the bundle's targets ({there}) has a lowered program, which plans are made from",
            hint="Export the model with --target cpu as well, or plan for the model itself.",
        )
    recipe = str(bundle.manifest.recipe.get("name") or "")
    planned = []
    for name in names:
        program, cuda = bundle.programs[name], bundle.target(name).section(CudaSection)
        mixed = cuda is not None and cuda.mixed_decodes
        planned.append(PlannedProgram((recipe,), program, formats_of(program, name), target=name, mixed_decodes=mixed))
    return PlannedModel(bundle.model, tuple(planned))


_FORMATS = {"fp8": "fp8", "i4": "int4", "u4": "int4", "bf16": "bf16"}


def formats_of(program: LoweredProgram, target: str) -> frozenset[str]:
    """Of its weights and caches, those that not every GPU has. The cuda target's kernels convert fp8 and int4 by bits,
    where there are no instructions."""
    if target == GPU_TARGET:
        floats = {o.dtype for step in program.steps for o in step.outputs}
        return frozenset({"bf16"} & floats)
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
