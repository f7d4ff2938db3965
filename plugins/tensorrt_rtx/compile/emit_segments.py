"""Writes the segments form for TensorRT-RTX: an engine for each distinct part between two attentions, and our attention
kernels.

Engines have weights as inputs, so a model with thirty layers has three or four engines. Keys and values are in the
paged cache, which our own kernels write and read without plugins.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from enginewright.passes.ir.program import Program
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.runtime.bundle.manifest import TargetManifest, target_folder
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from ...emit.base import EmitOptions
from ...emit.bundle_writer import BundleWriter
from ...engines.emit_kernels import (
    LayerKernels,
    emit_attention_kernels,
    emit_sampling_kernels,
)
from ...engines.section import EngineSection, TensorRtSection
from ...engines.segments import (
    AttentionKernels,
    Segment,
    SegmentProfile,
    SegmentSchedule,
    segments_path,
)
from ...gpu.tiles import capability_of, number_of
from ...graphs.float_types import FloatType
from ...graphs.weights import ExternalWeights
from ...steps.paged_section import KERNELS_FOLDER
from .adopt_engine import TARGET, adopt_engine
from .build_engine import EngineRequest, build_engine
from .segment_graphs import SegmentedModel, SegmentGraph, segment_model

REQUESTS, CHUNK = 16, 512
"""The default numbers: the most requests of a decode step, and the most tokens of any step."""

_USUAL_PROMPT = 128
"""The number of tokens for which the engines for prompts are optimized, if a step may have as many."""

_USUAL_BATCH = 4
"""The number of requests for which the engines for decode steps are optimized."""


def emit_segments(
    program: Program, writer: BundleWriter, progress: Progress, options: EmitOptions, gpus: Sequence[str]
) -> TargetManifest:
    """Builds the engines, compiles the kernels, and writes both with the weights and the schedule.

    Args:
        program: a program with attention in its paged form.
        writer: the bundle's writer.
        progress: called with the stages "kernels", "emit" and "engines".
        options: only ``engines`` and ``record`` are used.
        gpus: the compute capabilities, such as "8.9".

    Raises:
        UnsupportedModelError: see ``segment_model``.
        TargetError: kernels can't be compiled for a GPU or an attention's shape, or TensorRT-RTX rejects a graph.
        MissingDependencyError: tensorrt_rtx or Triton is not installed.
        SourceError, BundleError, CapacityError: a weight can't be read, or a file can't be written.
    """
    floats = options.engines.dtype or "f16"
    capabilities, folder = [number_of(name) for name in gpus], f"{target_folder(TARGET)}/{KERNELS_FOLDER}"
    kernels = emit_attention_kernels(program, capabilities, floats, folder, writer, progress, for_plugins=False)
    emit_sampling_kernels(program, gpus, folder, writer, progress)
    progress(ProgressEvent("emit", 0, len(program.weights)))
    model = segment_model(program, ExternalWeights(writer, progress, len(program.weights), "segments"), floats)
    profiles = profiles_of(options.engines)
    engines, version = _build(model.graphs, profiles, gpus, writer, progress, options)
    schedule = schedule_of(program, model, floats, profiles, kernels)
    writer.write_text(segments_path(TARGET), schedule.to_json())
    section = TensorRtSection(
        flavour="rtx",
        form="segments",
        version=version,
        compute_capabilities=tuple(gpus),
        dtype=floats,
        engines=engines,
    )
    return TargetManifest(sections={"tensorrt": section})


def profiles_of(section: EnginesSection) -> tuple[SegmentProfile, ...]:
    """Returns a profile for decode steps, and one for steps with prompts.

    As a segment's tokens are packed, the second profile also includes every smaller step.
    """
    requests = section.requests or REQUESTS
    most = max(section.chunk or CHUNK, requests)
    decode = (1, min(_USUAL_BATCH, requests), requests)
    return (
        SegmentProfile(T=decode, R=decode),
        SegmentProfile(T=(1, min(_USUAL_PROMPT, most), most), R=(1, 1, most)),
    )


def schedule_of(
    program: Program,
    model: SegmentedModel,
    floats: FloatType,
    profiles: tuple[SegmentProfile, ...],
    kernels: Iterable[LayerKernels],
) -> SegmentSchedule:
    """Returns the schedule for segments.json: the order of engines and attentions that the runtime follows."""
    return SegmentSchedule(
        dtype=floats,
        cache_groups=tuple(group.stored_as(floats) for group in program.cache_groups),
        profiles=profiles,
        segments=tuple(
            Segment(
                name=graph.name,
                file=_engine_file(graph),
                inputs=graph.inputs,
                weights=graph.weights,
                outputs=graph.outputs,
            )
            for graph in model.graphs
        ),
        buffers=model.buffers,
        steps=model.steps,
        kernels=tuple(_kernels(some) for some in kernels),
        summed_products=model.summed_products,
    )


def _build(
    graphs: Sequence[SegmentGraph],
    profiles: Sequence[SegmentProfile],
    gpus: Sequence[str],
    writer: BundleWriter,
    progress: Progress,
    options: EmitOptions,
) -> tuple[tuple[EngineSection, ...], str]:
    """Builds the engines. Returns their sections, and the version of the library that built them."""
    engines, version = [], ""
    with tempfile.TemporaryDirectory(dir=writer.folder) as scratch:
        for done, graph in enumerate(graphs, 1):
            source, plan = Path(scratch) / "segment.onnx", Path(scratch) / "segment.plan"
            source.write_bytes(graph.model)
            sizes = tuple({"T": profile.T, "R": profile.R} for profile in profiles)
            request = EngineRequest(source, plan, tuple(gpus), sizes, name=f"{TARGET}, {graph.name}")
            built = build_engine(request)
            version = built.version
            texts = tuple(f"T {p.T[0]} to {p.T[2]}, R {p.R[0]} to {p.R[2]}" for p in profiles)
            engines.append(adopt_engine(built, request, _engine_file(graph), texts, writer, options))
            progress(ProgressEvent("engines", done, len(graphs), graph.name))
    return tuple(engines), version


def _engine_file(graph: SegmentGraph) -> str:
    return f"{graph.name}.plan"


def _kernels(some: LayerKernels) -> AttentionKernels:
    return AttentionKernels(
        layers=some.layers,
        compute_capability=capability_of(some.capability),
        write=some.write,
        prefill=some.prefill,
        decode=some.decode,
        combine=some.combine,
    )
