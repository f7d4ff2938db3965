"""Builds an engine of the whole model, from its ONNX graph with slots of one size, with profiles for each phase."""

from __future__ import annotations

import importlib.util
import math
import shutil
from pathlib import Path

import onnx

from enginewright.passes.ir.program import Program
from enginewright.runtime.bundle.manifest import TargetManifest, target_folder
from enginewright.runtime.shared.errors import CapacityError
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from ...emit.base import EmitOptions
from ...emit.bundle_writer import BundleWriter
from ...engines.emit_kernels import emit_sampling_kernels
from ...engines.section import TensorRtSection
from ...graphs.emit_model import emit_model
from ...steps.linear_io import MODEL_FILE
from ...steps.paged_section import KERNELS_FOLDER
from .adopt_engine import TARGET, adopt_engine
from .build_engine import EngineRequest, build_engine
from .profiles import describe, profiles_of

PLAN_FILE = "model.plan"


def emit_whole(
    program: Program, writer: BundleWriter, progress: Progress, options: EmitOptions, capabilities: tuple[str, ...]
) -> TargetManifest:
    """Builds the engine targets/tensorrt-rtx/model.plan, and returns the target's manifest.

    The graph and its weights are next to the bundle's other files while the engine is built, and are then removed.

    Raises:
        RecipeError: the sizes conflict.
        UnsupportedModelError: standard operators can't express the program, or f16 can't represent a weight.
        TargetError, MissingDependencyError, CapacityError: see ``build_engine``.
    """
    profiles = profiles_of(options.engines, options.context_length, options.buckets)
    _check_disk(program, writer.final_path)
    with BundleWriter(writer.folder / f"{TARGET}.graph") as scratch:
        io = emit_model(program, scratch, progress, (options.engines.dtype or "f16"), profiles[0].C)
        scratch.finish_weights()
        graph = scratch.folder / MODEL_FILE
        signature = onnx.load(graph, load_external_data=False).graph
        request = EngineRequest(
            graph=graph,
            plan=scratch.folder / PLAN_FILE,
            compute_capabilities=capabilities,
            profiles=tuple({"B": p.B, "S": p.S, "R": p.R} for p in profiles),
            lengths=True,
            name=f"target {TARGET}",
            inputs=tuple(x.name for x in signature.input),
            outputs=tuple(x.name for x in signature.output),
        )
        progress(ProgressEvent("engine", 0, 1, f"for compute capability {', '.join(capabilities)}"))
        built = build_engine(request, lambda done, total, what: progress(ProgressEvent("engine", done, total, what)))
        progress(ProgressEvent("engine", 1, 1, PLAN_FILE))
        engine = adopt_engine(built, request, PLAN_FILE, tuple(describe(p) for p in profiles), writer, options)
    if importlib.util.find_spec("triton") is not None:  # without it the CPU draws tokens
        emit_sampling_kernels(program, capabilities, f"{target_folder(TARGET)}/{KERNELS_FOLDER}", writer, progress)
    section = TensorRtSection(
        flavour="rtx",
        form="whole",
        version=built.version,
        compute_capabilities=capabilities,
        dtype=(options.engines.dtype or "f16"),
        engines=(engine.model_copy(update={"profiles": profiles}),),
    )
    return TargetManifest(sections={"io": io.model_copy(update={"file": ""}), "tensorrt": section})


def _check_disk(program: Program, output: Path) -> None:
    """Raises CapacityError if the disk can't hold the weights twice, for the graph and for the engine, with 16 bits or
    less each.
    """
    needed = 4 * sum(math.prod(program.weights[name].shape) for name in program.weights)
    free = shutil.disk_usage(output.parent).free
    if needed > free:
        raise CapacityError(
            f"{output}: building the engine needs {needed:,} bytes, and {free:,} are free on that disk",
            hint="Free space there, or write the bundle to another disk.",
        )
