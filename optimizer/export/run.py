"""``export``: compiles a model into a bundle.

Arguments are checked first. torch and transformers take seconds to import, so they are imported only after that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from enginewright.optimizer.capture.check_source import check_source
from enginewright.optimizer.capture.find_source import describe_source, find_source
from enginewright.optimizer.capture.model_source import ADAPTER_FILES, AdapterArgument
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.memory import format_bytes
from enginewright.runtime.shared.progress import Progress, ProgressEvent, loading, silent

from .check_arguments import FOR_MODELS, NOT_QUANTIZED, ExportArguments, check_arguments, check_model, with_own_recipe
from .kept_exports import MOST_BYTES, KeptExports, describe, keep_export, key_of, no_room, take_export

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .report import ExportReport


def export(
    source: str | Path | PreTrainedModel,
    output: str | Path,
    *,
    revision: str | None = None,
    recipe: str | Path | Recipe | None = None,
    targets: Sequence[str] | None = None,
    context_length: int | None = None,
    calibration: str | Path | None = None,
    recovered: str | Path | None = None,
    max_memory: int | str | None = None,
    gpus: Sequence[str] | None = None,
    kv_cache: str | None = None,
    partitions: Sequence[str] | None = None,
    name: str | None = None,
    part: str | None = None,
    lora: Sequence[AdapterArgument] | None = None,
    overwrite: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    cache: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Exports a model: captures its decoder, applies the recipe's passes, and writes a bundle.

    The outputs of the program after each pass, and of the bundle, are compared with the source model's.

    Args:
        source: a Hugging Face directory, a GGUF file, the id of a model on the Hugging Face Hub ("org/name" or
            "org/name:Q4_K_M"), or a transformers model. A transformers model isn't changed.
        output: the folder of the bundle; it is created only if the export succeeds.
        revision: the branch, tag or commit of a Hub id.
        recipe: a built-in recipe's name, a TOML file, or a Recipe. The default is the recipe of ``recovered``, "gguf"
            for a GGUF file with quantized matrices, or otherwise "f32".
        targets: the names of targets, instead of the recipe's.
        context_length: the most tokens of a request, instead of the recipe's number.
        calibration: a file of text or JSONL for passes that need calibration tokens. By default the recipe decides:
            tokens are sampled from the model, or are the built-in text.
        recovered: a folder of ``recover``, whose weights replace the source's.
        max_memory: the limit for the process's resident memory, in bytes or as text such as "4GiB". The report
            states the peak, which can exceed the limit.
        gpus: the compute capabilities for which engines are built, such as "8.9" or "sm89", instead of the recipe's.
        kv_cache: the format of keys and values, instead of the recipe's: "f32", "bf16", "int8", or "auto:6000" (formats
            by layer, with at most 6,000 bytes per token).
        partitions: the partitions that the bundle must support on the cpu target, such as "tensor=2,pipeline=2",
            instead of the recipe's; see ``LLM``.
        name: the model's name in the bundle and its report; by default the name of its file or folder.
        part: "text" exports only the text decoder of a Hugging Face model that also accepts images or sounds.
        lora: folders of PEFT adapters to merge into the weights. A folder may have a weight by which the adapter is
            multiplied: "FOLDER=0.5", or a pair (folder, 0.5).
        overwrite: True replaces an existing bundle.
        tokenizer: the tokenizer if ``source`` is a transformers model.
        cache: True copies a cached bundle of an equal earlier export, or else caches the new bundle; see `optimize
            cache`. Exports of Hub ids and transformers models aren't cached, nor those with ``recovered`` or
            ``max_memory``.
        progress: a function that is called during the work.

    Raises:
        SourceError, UnsupportedModelError, RecipeError, PassError, BundleError, CapacityError: see these classes; the
            message names the file, field or module. Nothing is left on the disk, even after Ctrl-C.
        RequestError: the calibration file, a file that the recipe names, ``max_memory``, ``part`` or ``lora`` is
            invalid.
        TargetError: a GPU is unknown, or engines for it can't be built.
        PartialExportError: some of several targets failed. The bundle was written with the other targets; see its
            ``report``.
        VerificationError: a pass, or the bundle, differs from the source by more than the recipe allows. The message
            has the difference, and the values that a pass changed most.
    """
    start, on_progress = time.perf_counter(), progress or silent
    arguments = ExportArguments(
        source=source,
        revision=revision,
        recipe=recipe,
        targets=targets,
        context_length=context_length,
        calibration=calibration,
        recovered=recovered,
        max_memory=max_memory,
        gpus=gpus,
        kv_cache=kv_cache,
        partitions=partitions,
        name=name,
        part=part,
        lora=lora,
        tokenizer=tokenizer,
    )
    arguments = with_own_recipe(arguments, on_progress)
    chosen = check_arguments(arguments, output, overwrite)
    listed = check_model(arguments)
    key: str | None = None
    if cache and all(one is None for one in (revision, recovered, max_memory, tokenizer)):
        on_progress(ProgressEvent("cache", 0, 1, "looking for an earlier export of the same"))
        key = _key(arguments, chosen)
    if key is not None and (report := take_export(key, output, overwrite, arguments.inputs(chosen), start)) is not None:
        return report
    loading(on_progress)
    from .compile_model import compile_model
    from .request import ExportRequest

    report = compile_model(
        ExportRequest.from_arguments(arguments, chosen, on_progress), output, revision, listed, overwrite
    )
    unchanged = key is not None and key == _key(arguments, chosen)  # while the export worked
    if key is not None and unchanged and isinstance(source, str | os.PathLike):
        keep_export(key, report, source)
    return report


@dataclass(frozen=True)
class WantedExport:
    """A model on this disk, the settings of its cached export, and the cached bundle if there is one.

    Attributes:
        source: the model's folder or file, fetched if it is on the Hub.
        recipe: the passed recipe, or else the source's default.
        key: the key of its entry.
        bundle: the folder of the cached bundle; None if there is none yet.
    """

    source: Path
    recipe: Recipe
    key: str
    bundle: Path | None


def find_kept(source: str | Path, *, recipe: str | Path | None = None, progress: Progress = silent) -> WantedExport:
    """Finds the cached bundle of a model, without PyTorch; ``export_to_keep`` makes a missing one.

    Args:
        source: as for ``export``.
        recipe: as for ``export``; by default gguf for a GGUF file with quantized matrices, else int8.
        progress: called with the stage "recipe" if none is passed; its detail is the recipe and the reason.

    Raises SourceError and others for a model that can't be found, RequestError if there is no cache folder.
    """
    exports = KeptExports.of_user()
    place = find_source(source, progress=progress)
    check_source(place)
    arguments = with_own_recipe(ExportArguments(source=place, recipe=recipe), progress)
    if arguments.recipe is None:
        progress(ProgressEvent("recipe", 1, 1, NOT_QUANTIZED))
    named = arguments.recipe or FOR_MODELS
    chosen = named if isinstance(named, Recipe) else load_recipe(named)
    progress(ProgressEvent("cache", 0, 1, "looking for an earlier export of the same"))
    key = _key(replace(arguments, recipe=chosen), chosen, least=0)
    if key is None or exports.root is None:
        raise RequestError(
            f"{source}: its bundle can't be kept on this machine",
            hint="Export it, and name the bundle: optimize export MODEL -o model.bundle",
        )
    return WantedExport(place, chosen, key, exports.bundle(key))


def export_to_keep(wanted: WantedExport, progress: Progress = silent) -> Path:
    """Exports a model into the cache, unless another process has just done so, and returns the bundle's folder.

    One process exports at a time; others that need the same bundle wait for it. Remains of a killed one are removed.

    Raises the errors of ``export``, and CapacityError if the disk is too small.
    """
    exports, key = KeptExports.of_user(), wanted.key
    with exports.exporting(
        key, lambda: progress(ProgressEvent("wait", 0, 1, "for another process's export of the same"))
    ):
        if (bundle := exports.bundle(key)) is not None:
            return bundle
        with exports.unfinished(key) as output:
            report = export(wanted.source, output, recipe=wanted.recipe, progress=progress)
            entry = describe(key, output, report.recipe, report.targets, describe_source(wanted.source).name)
            whole = exports.keep(entry, output, MOST_BYTES + entry.bytes)
        if not whole or (bundle := exports.bundle(key)) is None:
            raise no_room(exports.root, f"for the bundle, {format_bytes(entry.bytes)}")
        return bundle


def _key(given: ExportArguments, recipe: Recipe | None, least: int | None = None) -> str | None:
    """Returns the key under which the export is cached; None if the source isn't on this disk, or can't be read."""
    if not isinstance(given.source, str | os.PathLike) or not os.path.exists(given.source):
        return None
    settings = {
        name: getattr(given, name)
        for name in ("targets", "context_length", "gpus", "kv_cache", "partitions", "name", "part")
    }
    try:
        files = {"calibration": given.calibration}
        for number, adapter in enumerate(given.model_source.adapters):
            settings[f"adapter {number}"] = (adapter.name, adapter.weight)
            files |= {f"adapter {number}: {name}": adapter.folder / name for name in ADAPTER_FILES}
        return key_of(Path(given.source), recipe or load_recipe("f32"), files=files, least=least, **settings)
    except OSError:
        return None  # the export says what can't be read
