"""The request of an export, checked as far as possible without the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from enginewright.optimizer.buckets.for_export import check_files
from enginewright.optimizer.capture.model_source import ModelSource
from enginewright.optimizer.pipeline.pipeline import EXTENSIONS, OPTIONAL
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe, with_cache, with_partitions
from enginewright.optimizer.recipes.targets import TARGETS, check_kernels, check_storages
from enginewright.optimizer.recover.finished import FinishedRecovery
from enginewright.plugins.gpu.formats import parse_capabilities
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.runtime.bundle.output_folder import Inputs
from enginewright.runtime.shared.errors import RecipeError
from enginewright.runtime.shared.progress import Progress

from .check_arguments import ExportArguments, check_target_names, with_own_recipe
from .memory_limit import MemoryLimit


@dataclass(frozen=True)
class ExportRequest:
    """The checked arguments of an export.

    Attributes:
        source: a Hugging Face directory, a GGUF file, or a model, with its adapters.
        recipe: the loaded recipe; for a recovery, with the shapes that were trained.
        targets: the targets to emit; at least one.
        context_length: the longest request in tokens; None leaves it to the model.
        calibration: a file of text for passes that need calibration tokens.
        trained: the recovery whose weights are exported; None without one.
        limit: the memory limit.
        tokenizer: the tokenizer of a model object, which brings none.
        on_progress: called as the work proceeds.
        inputs: description -> file or folder of each input; none of them may be overwritten.
        name: the model's name; None takes its file's or folder's.
        recipe_from: the recipe's name or file; None if it is an object, or the default.
        arguments: the arguments that all of this was made from.
        part: the part of the model to export, "text"; None takes it whole.
    """

    source: ModelSource
    recipe: Recipe
    targets: tuple[str, ...]
    context_length: int | None
    calibration: str | Path | None
    trained: FinishedRecovery | None
    limit: MemoryLimit
    tokenizer: PreTrainedTokenizerBase | None
    on_progress: Progress
    inputs: Inputs
    name: str | None = None
    recipe_from: str | Path | None = None
    arguments: ExportArguments | None = None
    part: str | None = None

    @staticmethod
    def from_arguments(given: ExportArguments, loaded: Recipe | None, on_progress: Progress) -> ExportRequest:
        """Checks the arguments of ``export``, and returns the request. ``loaded``: the recipe, if it was read already.

        Raises:
            RecipeError: a target or pass of the recipe doesn't exist, or the recovery was trained for another recipe.
            SourceError: ``recovered`` isn't a finished recovery.
            TargetError: one of ``gpus`` is unknown; or a target or GPU doesn't support the recipe's weights or KV
                cache.
            MissingDependencyError: a target's package isn't installed.
            RequestError: a file of lengths is invalid, or ``max_memory`` isn't a size.
        """
        trained = None if given.recovered is None else FinishedRecovery.open(given.recovered)
        chosen = _recipe(given.recipe if loaded is None else loaded, trained)
        targets = _check_targets(tuple(given.targets) if given.targets is not None else chosen.targets)
        _check_passes(chosen, targets)
        if given.gpus:
            engines = (chosen.engines or EnginesSection()).model_copy(update={"gpus": parse_capabilities(given.gpus)})
            chosen = chosen.model_copy(update={"engines": engines})
        if given.kv_cache is not None:
            chosen = with_cache(chosen, given.kv_cache)
        if given.partitions:
            chosen = with_partitions(chosen, given.partitions)
        check_storages(chosen, targets)
        check_kernels(chosen, targets)
        if chosen.buckets is not None:
            check_files(chosen.buckets)
        return ExportRequest(
            given.model_source,
            chosen,
            targets,
            given.context_length or chosen.context_length,
            given.calibration,
            trained,
            MemoryLimit.parse(given.max_memory),
            given.tokenizer,
            on_progress,
            given.inputs(chosen),
            given.name,
            given.recipe if isinstance(given.recipe, str | Path) else None,
            given,
            part=given.part,
        )

    def of(self, source: Path) -> ExportRequest:
        """Returns the request with its source at ``source`` on this disk, and with the source's own recipe if none was
        passed.

        Raises the errors of ``from_arguments``, if that recipe and the other arguments conflict.
        """
        if self.arguments is not None:
            arguments = with_own_recipe(replace(self.arguments, source=source), self.on_progress)
            if arguments.recipe != self.arguments.recipe:
                return ExportRequest.from_arguments(arguments, None, self.on_progress)
        return replace(self, source=self.source.at(source))


def _recipe(given: str | Path | Recipe | None, trained: FinishedRecovery | None) -> Recipe:
    """Returns the recipe that was passed, or the one that a recovery implies. Raises RecipeError if they are in
    conflict.
    """
    if given is None:
        return load_recipe("f32") if trained is None else trained.recipe_for(None)
    chosen = given if isinstance(given, Recipe) else load_recipe(given)
    return chosen if trained is None else trained.recipe_for(chosen)


def _check_passes(recipe: Recipe, targets: Sequence[str]) -> None:
    known = OPTIONAL | {p.name for name in targets for p in TARGETS[name].emitter.passes() if p.exact}
    for name in recipe.passes:
        if name not in known and name not in EXTENSIONS:
            raise RecipeError(
                f"recipe {recipe.name}: passes.{name}: there is no pass of that name to turn on or off",
                hint=f"Passes that can be: {', '.join(sorted(known))}.",
            )


def _check_targets(targets: tuple[str, ...]) -> tuple[str, ...]:
    check_target_names(targets)
    for name in targets:
        TARGETS[name].check()
    return targets
