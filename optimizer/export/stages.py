"""The stages of an export, one function each, in their order. ``export`` calls them and measures their times."""

from __future__ import annotations

import math
import os
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from enginewright.optimizer.buckets.for_export import ExportBuckets, buckets_of
from enginewright.optimizer.calibration import Calibration, calibrate
from enginewright.optimizer.capture import CapturedModel, capture
from enginewright.optimizer.capture.find_source import find_source
from enginewright.optimizer.capture.gguf.file import open_gguf
from enginewright.optimizer.capture.gguf.header import KEPT_BLOCKS
from enginewright.optimizer.capture.huggingface import weight_files
from enginewright.optimizer.capture.model_source import ModelSource
from enginewright.optimizer.capture.tokenizer import with_tables
from enginewright.optimizer.check_bundle import engine_problem
from enginewright.optimizer.pipeline.pass_context import Recovered, needs_tokens, pass_context
from enginewright.optimizer.pipeline.pipeline import choose_passes, left_on
from enginewright.optimizer.plan.token_clock import TokenClock
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.targets import TARGETS, check_layers, check_pooled
from enginewright.optimizer.report.export_report import storage_and_speed
from enginewright.optimizer.report.fusion_effects import fusion_effects
from enginewright.optimizer.report.roofline import Roofline
from enginewright.optimizer.search.compose import Searched, Searching, search
from enginewright.optimizer.search.formats import check_bytes
from enginewright.optimizer.shared.export_records import FusionEffects, VerificationReport
from enginewright.optimizer.shared.storage import StoredBytes
from enginewright.optimizer.verify import PassMeasurements, measure_against, verify
from enginewright.passes.attention.kv_sites import attention_paths
from enginewright.passes.framework.base import Pass
from enginewright.passes.ir.calls import calls_of
from enginewright.passes.ir.code_files import CodeFiles
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.scaling import scaling_of
from enginewright.passes.ir.weights import WeightExpr
from enginewright.plugins.emit.base import EmitOptions
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.emit.engine_report import EngineReport
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.runtime.bundle.manifest import Manifest, ModelSection, PassSection, TargetManifest
from enginewright.runtime.bundle.reader import CODE, Bundle
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.executors.open import variants_of
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError, SourceError, SourceWarning
from enginewright.runtime.shared.memory import return_freed_memory
from enginewright.runtime.shared.progress import ProgressEvent
from enginewright.runtime.shared.targets import MEASURED
from enginewright.runtime.text.tokenizer import Tokenizer

from .request import ExportRequest
from .rewrite import OF_ONE_TARGET, Rewritten, first_of, rewrite
from .token_time import check_time

if TYPE_CHECKING:
    from enginewright.optimizer.capture.hub import Listing

_FEW_BITS = 6.5
"""The bits per weight, scales included, up to which a file counts as rounded to 4 or 5 bits (some weights to 6)."""

_SHORTEST_STEP = 1e-3
"""The seconds of a decode step below which fusions aren't timed, as for models for tests."""

_TOOLS = ("enginewright", "torch", "transformers")
"""The Python packages that take part in every export."""

_WIDEST = 4
"""The most bytes of a number in a bundle. 64-bit numbers of the program are stored with 32 bits."""


class Clock:
    """Measures the seconds of each stage: the time since the end of the stage before it."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        """The seconds since the start of the export."""
        return time.perf_counter() - self.start

    def end(self, name: str, elsewhere: float = 0.0) -> None:
        """Ends the stage ``name``. ``elsewhere``: the seconds of it that are counted as the stage "measure"."""
        self.seconds["measure"] = self.seconds.get("measure", 0.0) + elsewhere
        self.seconds[name] = self.elapsed - sum(self.seconds.values())


@dataclass(frozen=True)
class OpenModel:
    """The captured model, whose program passes rewrite, and the recipe so far.

    ``recipe`` is updated first with the sizes of ``buckets``, then with the results of searches.
    """

    captured: CapturedModel
    recipe: Recipe
    buckets: ExportBuckets | None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The bundle's tokenizer; None if the source has none."""
        files = self.captured.tokenizer_files
        return Tokenizer(files) if files is not None and files.tokenizer_json else None

    @property
    def template_appends(self) -> bool | None:
        """True if the model's chat template only appends: see ``Tokenizer.template_appends``.

        None without a tokenizer.
        """
        return None if self.tokenizer is None else self.tokenizer.template_appends


def find_model(request: ExportRequest, revision: str | None, listed: Listing | None, clock: Clock) -> ExportRequest:
    """Returns the request with a local path as its source. A model of the Hub is fetched, and timed as a stage of its
    own.
    """
    model = request.source.model
    if isinstance(model, torch.nn.Module):
        if revision is not None:
            raise SourceError(
                "revision: it is for models of the Hub, and a model object is given", hint="Leave it out."
            )
        return request
    place = find_source(model, revision=revision, progress=request.on_progress, listed=listed)
    if not os.path.exists(model):
        clock.end("download")
    request = request.of(place)
    warn_of_few_bits(place, request.recipe)
    return request


def warn_of_few_bits(source: Path, recipe: Recipe) -> None:
    """Warns, before the work, if a recipe rounds weights of a file with few bits to other 4-bit integers.

    The second rounding makes small models worse.
    """
    if source.is_dir() or recipe.weights.default.storage != "int4" or recipe.weights.keep_blocks:
        return
    matrices = [t for t in open_gguf(source).tensors.values() if len(t.shape) > 1]
    weights = sum(int(t.n_elements) for t in matrices)
    bits = 8 * sum(int(t.n_bytes) for t in matrices) / max(weights, 1)
    if bits > _FEW_BITS:
        return
    sizes = Counter[str]()
    for tensor in matrices:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    kind = sizes.most_common(1)[0][0] if sizes else "few bits"
    exact = kind in KEPT_BLOCKS.values()
    instead = "gguf keeps the file's integers as they are" if exact else "int8 loses hardly anything more"
    warnings.warn(
        f"{source.name} has {bits:.1f} bits a weight already ({kind}), and recipe {recipe.name} rounds them once more, "
        f"to 4-bit integers of its own: the export may fail its budget. --recipe {instead}.",
        SourceWarning,
        stacklevel=2,
    )


def open_model(request: ExportRequest) -> OpenModel:
    """Captures the model, and checks that the targets and the recipe fit its layers and its context."""
    request.on_progress(
        ProgressEvent("capture", 0, 1, str(getattr(request.source.model, "name_or_path", request.source.model)))
    )
    captured = capture(
        request.source,
        tokenizer=request.tokenizer,
        context_length=request.context_length,
        name=request.name,
        part=request.part,
        pooling=request.recipe.pooling,
    )
    for text in captured.warnings:
        warnings.warn(text, SourceWarning, stacklevel=2)
    check_layers(captured.program, request.targets)
    if (pooling := captured.model_info.pooling) is not None:
        check_pooled(pooling.task, request.recipe, request.targets)
    return_freed_memory()  # a tokenizer's text is read in many small pieces: 200 MB for 262,144 tokens
    request.on_progress(ProgressEvent("capture", 1, 1, captured.model_info.architecture))
    recipe, buckets = request.recipe, None
    if request.trained is not None:
        request.trained.check_source(captured)
    if recipe.buckets is not None:
        buckets = buckets_of(recipe.buckets, captured.model_info.context_length)
        recipe = recipe.model_copy(update={"buckets": buckets.section})
    if recipe.attention is not None and not recipe.attention.searched:
        recipe.attention.check(attention_paths(captured.program), recipe.name)
    recipe.kv_cache.check(attention_paths(captured.program), recipe.name)
    return OpenModel(captured, recipe, buckets)


def calibration_tokens(request: ExportRequest, model: OpenModel) -> Calibration | None:
    """Returns the calibration tokens: a recovery's, a file's, or sampled ones; None if no pass needs any."""
    info = model.captured.model_info
    known = None if request.trained is None else request.trained.calibration(info, request.calibration)
    if known is not None:
        return known
    if request.calibration is None and model.recipe.auto is None and not needs_tokens(model.recipe, request.targets):
        return None
    return calibrate(
        request.source,
        info,
        model.recipe.calibration,
        file=request.calibration,
        tokenizer=model.tokenizer,
        progress=request.on_progress,
        keep_bytes=request.limit.keep_bytes(),
        cache_bytes=request.limit.cache_bytes(),
    )


def search_within_budget(
    request: ExportRequest,
    model: OpenModel,
    sequences: Sequence[torch.Tensor],
    scratch: Path,
    code_files: CodeFiles,
) -> Searched:
    """Runs the searches that the recipe asks for, and returns the recipe with their results in place of the budgets.

    ``sequences``: token ids of the calibration, [S] each. ``scratch``, ``code_files``: see ``PassContext``.
    """
    inputs = Searching(
        model.captured,
        sequences,
        scratch,
        request.limit.memory_budget(),
        request.on_progress,
        _trained(request) if model.recipe.auto is not None else None,
        request.targets,
        None if model.recipe.budget.max_ms_per_token is None else TokenClock(model.recipe),
        code_files,
    )
    return search(model.recipe, inputs)


def measure_source(
    request: ExportRequest, model: OpenModel, sequences: Sequence[torch.Tensor], clock: Clock
) -> PassMeasurements:
    """Computes the source's logits, with which the program is compared after every pass."""
    return measure_against(
        request.source,
        model.captured,
        model.recipe,
        calibration=sequences,
        started=clock.start,
        progress=request.on_progress,
        keep_bytes=request.limit.keep_bytes(),
        recipe_from=request.recipe_from,
    )


def run_passes(
    request: ExportRequest,
    model: OpenModel,
    sequences: Sequence[torch.Tensor],
    scratch: Path,
    code_files: CodeFiles,
    measurements: PassMeasurements,
) -> Rewritten:
    """Runs the common passes, then each target's on a copy of the program, and measures each pass."""
    passes, required = choose_passes(model.recipe.passes, caches=model.captured.model_info.pooling is None)
    context = pass_context(
        model.recipe,
        required,
        sequences,
        scratch=scratch,
        code_files=code_files,
        progress=request.on_progress,
        memory_budget=request.limit.memory_budget(),
        recovered=_trained(request),
        targets=request.targets,
    )
    of_targets = _passes_of_targets(request, model)
    return rewrite(model.captured.program, passes, of_targets, context, measurements, request.on_progress)


@dataclass(frozen=True)
class Written:
    """A complete bundle that doesn't have its final name yet.

    Attributes:
        info: the bundle's description of its model.
        targets: the targets that it has.
        failed: the error of each target that it lacks.
        engines: the engines that were built.
    """

    info: ModelInfo
    targets: tuple[str, ...]
    failed: Mapping[str, EnginewrightError]
    engines: tuple[EngineReport, ...] = ()


def write_bundle(
    request: ExportRequest,
    model: OpenModel,
    rewritten: Rewritten,
    writer: BundleWriter,
    scratch: Path,
    code_files: CodeFiles,
) -> Written:
    """Evaluates and writes all weights, then the other files. Deletes the passes' files in ``scratch``.

    A target whose emitter fails is omitted if there is another one; otherwise its error is raised.
    """
    captured = model.captured
    removed = sum(record.parameters_removed for record in rewritten.records)
    info = replace(captured.model_info, parameters=captured.model_info.parameters - removed)
    _check_disk(list(rewritten.programs.values()), writer.final_path, code_files)
    engines: list[EngineReport] = []
    options = EmitOptions(
        engines=model.recipe.engines or EnginesSection(),
        context_length=info.context_length,
        buckets=model.buckets.plan if model.buckets else None,
        record=engines.append,
        sections=model.recipe.target_tables(),
    )
    emitted, failed = dict[str, TargetManifest](), dict(rewritten.failed)
    for name, program in rewritten.programs.items():
        built = len(engines)
        try:
            with writer.undone_by_error(name):
                emitted[name] = TARGETS[name].emitter.emit(program, writer, request.on_progress, options)
        except OF_ONE_TARGET as e:
            failed[name] = e
            del engines[built:]
    if not emitted:
        raise first_of(failed)
    targets = tuple(emitted)
    _write_scales(rewritten.programs[targets[0]], writer)
    shutil.rmtree(scratch)
    for path, data in with_tables(captured.tokenizer_files or TokenizerFiles()).to_files().items():
        writer.write_bytes(path, data)
    writer.complete(_manifest(model, info, rewritten, targets), emitted)
    return Written(info, targets, failed, tuple(engines))


def _write_scales(program: Program, writer: BundleWriter) -> None:
    """Writes the scales and rotations of channels. No step reads them: they are for adapters trained on the source."""
    scaling = scaling_of(program, calls_of(program))
    for value, scale in scaling.scales.items():
        writer.weights().add(f"{value.path}.{value.what}_scale", scale)
    for value, size in scaling.rotations.items():
        writer.weights().add(f"{value.path}.{value.what}_rotation", np.array([size], np.int32), dtype="i32")


@dataclass(frozen=True)
class Ran:
    """The results of running the finished bundle as a user would; each list has an entry for each target that runs
    here.

    ``ms_per_token``: milliseconds per token of the first target, if the recipe's budget limits the time. Engines for
    GPUs run only on a machine with such a GPU.
    """

    verification: list[VerificationReport]
    storage: list[StoredBytes]
    rooflines: list[Roofline]
    fusion_effects: list[FusionEffects]
    ms_per_token: float | None


def run_bundle(request: ExportRequest, model: OpenModel, rewritten: Rewritten, folder: Path, clock: Clock) -> Ran:
    """Compares each target that runs here with the source, and measures the bundle's bytes and speed for the report."""
    on_progress, limit = request.on_progress, request.limit
    opened = Bundle.open(folder)
    here = [name for name in request.targets if engine_problem(opened, name) is None]
    verification: list[VerificationReport] = []
    for name in here:
        for variant in variants_of(opened, name):
            if variant == "bf16":  # onnxruntime has no products of it on a CPU
                continue
            placement, first = Placement(variant=variant), not verification
            verification.append(
                verify(
                    Bundle.open(folder, CODE),
                    request.source,
                    model.recipe,
                    name,
                    on_progress,
                    limit.keep_bytes(),
                    placement,
                    time_source=first,
                )
            )
    clock.end("verify")
    storage, rooflines = storage_and_speed(folder, request.targets, clock.elapsed, on_progress, limit.memory_budget())
    check_bytes(storage, model.recipe)
    timed = check_time(Bundle.open(folder, CODE), here[0], model.recipe) if here else None
    clock.end("roofline")
    matched = {(s.target, s.name): s.matched for s in rewritten.summaries}
    bundle = Bundle.open(folder)
    effects = [
        fusion_effects(
            model.captured.program,
            some,
            {p.name: matched.get((name, p.name), 0) for p in some},
            bundle,
            kv_cache=model.recipe.kv_cache,
            memory_budget=limit.memory_budget(),
            shortest=_SHORTEST_STEP,
        )
        for name, some in _passes_of_targets(request, model).items()
        if name == MEASURED  # fusions of others aren't measured one by one
    ]
    clock.end("fusions")
    return Ran(verification, storage, rooflines, effects, timed)


def source_bytes(source: ModelSource) -> int:
    """Returns the bytes of the source's weights: a GGUF file, a folder's safetensors files, or a model object's
    parameters.
    """
    path = source.path
    if path is None:
        return sum(p.numel() * p.element_size() for p in source.model_object.parameters())
    return sum(file.stat().st_size for file in ([path] if path.is_file() else weight_files(path)))


def _trained(request: ExportRequest) -> Recovered | None:
    """Returns the weights and the recipe of a recovery; None without one."""
    return None if request.trained is None else Recovered(request.trained.weights(), request.trained.recipe)


def _passes_of_targets(request: ExportRequest, model: OpenModel) -> dict[str, list[Pass]]:
    return {name: left_on(TARGETS[name].emitter.passes(), model.recipe.passes) for name in request.targets}


def _manifest(model: OpenModel, info: ModelInfo, rewritten: Rewritten, targets: Sequence[str]) -> Manifest:
    """Returns the manifest without targets and files, which aren't known yet."""
    return Manifest(
        model=ModelSection.from_info(info),
        source=model.captured.source,
        targets=(),
        recipe=model.recipe.model_dump(mode="json"),
        passes=tuple(PassSection(name=r.name, matched=r.matched, rejected=len(r.rejected)) for r in rewritten.records),
        toolchain={
            name: version(name) for name in (*_TOOLS, *(tool for target in targets for tool in TARGETS[target].tools))
        },
    )


def _check_disk(programs: Sequence[Program], output: Path, code_files: CodeFiles) -> None:
    """Raises CapacityError before minutes of writing if the disk is too full, also without ``code_files``.

    The writer reports a disk that fills up later.

    Args:
        programs: the programs of the targets, in their order. A weight that two of them store alike is stored once.
        output: the folder of the bundle.
        code_files: files that can be deleted.
    """
    first, *others = programs
    needed = sum(_bytes_of(first.weights[name]) for name in first.weights)
    needed += sum(_bytes_of(program.weights[name]) for program in others for name in _packed_weights(program))
    free = shutil.disk_usage(output.parent).free
    if needed > free:
        code_files.clear()
        free = shutil.disk_usage(output.parent).free
    if needed > free:
        raise CapacityError(
            f"{output}: the weights need {needed:,} bytes, and {free:,} are free on that disk",
            hint="Free space there, or write the bundle to another disk.",
        )


def _bytes_of(expr: WeightExpr) -> int:
    return math.prod(expr.shape) * min(expr.dtype.itemsize, _WIDEST)


def _packed_weights(program: Program) -> list[str]:
    """Returns the names of weights that each target stores in a layout of its own: those of products."""
    tables = (torch.ops.ew.embedding.default, torch.ops.ew.quantized_embedding.default)
    return list(
        dict.fromkeys(
            str(node.target)
            for node in program.graph.nodes
            if node.op == "get_attr"
            and len(program.weights[str(node.target)].shape) > 1
            and any(user.target not in tables for user in node.users)
        )
    )
