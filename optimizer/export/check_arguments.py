"""Checks an export's arguments before torch and transformers are imported, which takes longer than the checks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from enginewright.optimizer.buckets.for_export import check_files
from enginewright.optimizer.capture.check_source import TEXT
from enginewright.optimizer.capture.find_source import check_named
from enginewright.optimizer.capture.gguf.header import has_kept_blocks
from enginewright.optimizer.capture.model_source import AdapterArgument, ModelSource, check_adapters, parse_adapters
from enginewright.optimizer.measure.texts import read_text
from enginewright.optimizer.recipes.bucket_section import FILE_FIELDS
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe, recipe_file, with_cache, with_partitions
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.gpu.formats import parse_capabilities
from enginewright.runtime.bundle.output_folder import Inputs
from enginewright.runtime.executors.open import TARGETS
from enginewright.runtime.shared.errors import RecipeError, RequestError
from enginewright.runtime.shared.memory import parse_size
from enginewright.runtime.shared.progress import Progress, ProgressEvent

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from enginewright.optimizer.capture.hub import Listing

_LONGEST_NAME = 200

KEEPS_BLOCKS = "gguf"
"""The default recipe of a GGUF file with quantized matrices. It keeps the file's integers."""
AS_QUANTIZED = f"{KEEPS_BLOCKS}, as the file is quantized"
"""The reason for ``KEEPS_BLOCKS`` that a user sees."""
FOR_MODELS = "int8"
"""The default recipe of a model that a command runs, if the file itself implies none."""
NOT_QUANTIZED = f"{FOR_MODELS}, as no recipe is named and the model isn't a quantized GGUF file"


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """The arguments of ``export``, as the caller passed them; ``export`` documents them."""

    source: str | Path | PreTrainedModel
    revision: str | None = None
    recipe: str | Path | Recipe | None = None
    targets: Sequence[str] | None = None
    context_length: int | None = None
    calibration: str | Path | None = None
    recovered: str | Path | None = None
    max_memory: int | str | None = None
    gpus: Sequence[str] | None = None
    kv_cache: str | None = None
    partitions: Sequence[str] | None = None
    name: str | None = None
    part: str | None = None
    lora: Sequence[AdapterArgument] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def model_source(self) -> ModelSource:
        """The source with its adapters. Raises RequestError for an adapter that can't be read as one."""
        return ModelSource(self.source, parse_adapters(self.lora))

    def inputs(self, loaded: Recipe | None) -> Inputs:
        """Returns description -> file or folder, for everything that the export reads and must not overwrite.

        ``loaded``: the recipe, which may name files too; None if there is none.
        """
        buckets = None if loaded is None else loaded.buckets
        return {
            "the source": self.source if isinstance(self.source, str | os.PathLike) else None,
            "the recipe": None if self.recipe is None else recipe_file(self.recipe),
            "the calibration file": self.calibration,
            "the recovered folder": self.recovered,
            **{f"the adapter {adapter.folder}": adapter.folder for adapter in self.model_source.adapters},
            **({f"the recipe's file {name}": getattr(buckets, name) for name in FILE_FIELDS} if buckets else {}),
        }


def with_own_recipe(given: ExportArguments, progress: Progress) -> ExportArguments:
    """Adds the recipe ``KEEPS_BLOCKS`` if no recipe is passed and the source on this disk has quantized blocks.

    A recovery has a recipe of its own. ``progress`` is called with the stage "recipe" if the recipe is added.
    """
    if given.recipe is not None or given.recovered is not None or not isinstance(given.source, str | os.PathLike):
        return given
    if not has_kept_blocks(given.source):
        return given
    progress(ProgressEvent("recipe", 1, 1, AS_QUANTIZED))
    return replace(given, recipe=KEEPS_BLOCKS)


def check_arguments(given: ExportArguments, output: str | Path, overwrite: bool = False) -> Recipe | None:
    """Checks the arguments as far as that is possible without the model; ``check_model`` checks the rest.

    Returns the recipe, which may be a pipe and is read only once; None if none is passed. Raises the errors of
    ``export``.
    """
    recipe, name = given.recipe, given.name
    chosen = load_recipe(recipe) if isinstance(recipe, str | os.PathLike) else recipe
    if given.targets is not None:
        check_target_names(given.targets)
    if given.gpus:
        parse_capabilities(given.gpus)
    if given.kv_cache is not None:
        with_cache(chosen or load_recipe("f32"), given.kv_cache)
    if given.partitions:
        with_partitions(chosen or load_recipe("f32"), given.partitions)
    if given.max_memory is not None:
        parse_size(given.max_memory, "max_memory", least=1)
    if chosen is not None and chosen.buckets is not None:
        check_files(chosen.buckets)
    if given.calibration is not None and not os.path.exists(given.calibration):
        read_text(given.calibration, "calibration", "")
    if given.lora and given.recovered is not None:
        raise RequestError(
            "lora: a recovery has weights of its own in the places of the source's",
            hint="Merge the adapter first: export without --recovered, or recover the merged model.",
        )
    check_adapters(given.model_source)
    if name is not None and (not name.strip() or not name.isprintable() or len(name) > _LONGEST_NAME):
        raise RequestError(
            f"name: {name!r:.80} can't be a model's name", hint=f"Pass up to {_LONGEST_NAME} characters in one line."
        )
    if given.part is not None and given.part != TEXT:
        raise RequestError(f"part: there is no {given.part!r}", hint=f"The part that can be taken alone is {TEXT}.")
    BundleWriter(output, overwrite, given.inputs(chosen)).check()
    return chosen


def check_model(given: ExportArguments) -> Listing | None:
    """Checks a model on this disk, or by a request to the Hub.

    Returns the Hub's answer for later use; None for a model on this disk. Raises the errors of ``export``.
    """
    if not isinstance(given.source, str | os.PathLike):
        return None
    return check_named(given.source, revision=given.revision)


def check_target_names(names: Sequence[str]) -> None:
    """Raises RecipeError if there are no names, or a target doesn't exist."""
    known = ", ".join(TARGETS)
    for name in names:
        if name not in TARGETS:
            raise RecipeError(f"target: there is no {name!r}", hint=f"Targets: {known}.")
    if not names:
        raise RecipeError("no target is given", hint=f"Targets: {known}.")
