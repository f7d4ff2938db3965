"""Makes the programs of a model from its configuration alone: runs the passes of an export without reading weights."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from enginewright.optimizer.capture.build_pooled import find_pooled
from enginewright.optimizer.capture.capture_model import capture_shapes
from enginewright.optimizer.capture.find_source import find_source
from enginewright.optimizer.pipeline.pass_context import pass_context
from enginewright.optimizer.pipeline.pipeline import choose_passes, left_on, split_before
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.targets import TARGETS, check_kernels, check_layers
from enginewright.optimizer.shared.resources import fewer_collections
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.ir.program import Program
from enginewright.passes.quantization.choose_formats import ChooseFormats
from enginewright.plugins.emit.base import EmitOptions
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.steps.planning import CountedSteps
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import EnginewrightError, UnsupportedModelError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

from .programs import PlannedProgram, planning_of, undecided

if TYPE_CHECKING:
    from enginewright.optimizer.capture.hub import Listing


def programs_of_model(
    source: str | Path,
    recipes: Sequence[Recipe],
    progress: Progress,
    targets: Sequence[str],
    listed: Listing | None = None,
) -> tuple[ModelInfo, tuple[PlannedProgram, ...]]:
    """Returns a model's properties, and the programs that recipes make of it.

    Args:
        source: a model's folder, a GGUF file, or a Hub id.
        recipes: the recipes.
        progress: called with the stages of an export.
        targets: the targets whose programs are made.
        listed: the Hub's list of the model's files, if it was requested already; None otherwise.

    Raises UnsupportedModelError for a model that computes whole texts, and the errors of an export.
    """
    with fewer_collections():
        path = find_source(source, weights=False, progress=progress, listed=listed)
        progress(ProgressEvent("capture", 0, 1, path.name))
        if (pooled := find_pooled(path)) is not None:
            raise UnsupportedModelError(
                f"{path} is a model for {pooled[0].task}, and only models that generate text are planned",
                hint="Export and serve it; `optimize loadtest --embed` measures a server with an embedding model.",
            )
        program, info = capture_shapes(path)
        programs: list[PlannedProgram] = []
        known: dict[Hashable, int] = {}  # by their steps: of weights' names plans know nothing
        prepared: dict[tuple[str, ...], Program] = {}
        for done, recipe in enumerate(recipes):
            progress(ProgressEvent("recipes", done, len(recipes), recipe.name))
            for target in targets:
                if why := undecided(recipe):
                    programs.append(PlannedProgram((recipe.name,), None, target, omitted=why))
                    continue
                try:
                    lowered = _lowered(program, recipe, target, prepared)
                except EnginewrightError as e:
                    if len(recipes) == 1:
                        raise
                    programs.append(PlannedProgram((recipe.name,), None, target, omitted=e.message))
                    continue
                kinds = CountedSteps(lowered).keys
                planning = planning_of(target)
                assert planning is not None, "it was chosen for that"
                if (same := known.get((target, kinds))) is None:
                    known[target, kinds] = len(programs)
                    formats = planning.formats(lowered)
                    programs.append(PlannedProgram((recipe.name,), lowered, target, formats))
                else:  # other numbers in weights of the same sizes, as GPTQ chooses them
                    programs[same] = replace(programs[same], recipes=(*programs[same].recipes, recipe.name))
        progress(ProgressEvent("recipes", len(recipes), len(recipes)))
    return info, tuple(programs)


def _lowered(
    captured: Program, recipe: Recipe, target: str, prepared: dict[tuple[str, ...], Program]
) -> LoweredProgram:
    """Returns the lowered program of a recipe for a target.

    Methods that choose numbers by the values of a model are replaced by rounding to nearest, since they change no size.

    Args:
        captured: the captured program.
        recipe: the recipe.
        target: the name of the target.
        prepared: the programs before formats are chosen, by the names of the active passes; new ones are added.

    Raises:
        TargetError: the target has no kernels for the recipe.
        UnsupportedModelError: the target has no kernels for a recurrent layer.
    """
    check_kernels(recipe, (target,))
    check_layers(captured, (target,))
    nearest = recipe.model_copy(
        update={"weights": recipe.weights.model_copy(update={"method": "nearest", "smooth": False, "rotate": False})}
    )
    passes, required = choose_passes(recipe.passes)
    before, after = split_before(passes, ChooseFormats.name)
    context = pass_context(nearest, required, (), scratch=None, progress=silent, targets=(target,))
    key = tuple(one.name for one in before if one.wanted(context))
    if key not in prepared:
        prepared[key] = captured.copy()
        PassManager([one for one in before if one.wanted(context)], context).run(prepared[key])
    program = prepared[key].copy()
    after += left_on(TARGETS[target].emitter.passes(), recipe.passes)
    PassManager([one for one in after if one.wanted(context)], context).run(program)
    lower = TARGETS[target].lower
    assert lower is not None, "its programs are planned"
    return lower(program, EmitOptions(engines=recipe.engines or EnginesSection())).program
