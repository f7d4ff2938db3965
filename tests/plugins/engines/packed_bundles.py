"""Bundles of the tiny decoder with caches in blocks, whose engines are names that the fakes know."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.engines.section import EngineSection, TensorRtSection
from enginewright.plugins.engines.segments import SegmentProfile, SegmentSchedule, segments_path
from enginewright.plugins.gpu.compile_ahead import files_of
from enginewright.plugins.steps.paged_section import PagedProfile, PagedSection
from enginewright.runtime.bundle.manifest import Manifest, ModelSection, SourceSection, TargetManifest
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from tests.plugins.engines import tiny_paged as paged
from tests.plugins.steps import tiny_onnx as tiny

from .fake_tensorrt import MODELS, rtx_plan

DECODE = PagedProfile(phase="decode", T=(1, 4, 8), B=(1, 4, 8), R=(1, 4, 8), M=(1, 8, 10), P=(1, 40, 60))
PREFILL = PagedProfile(phase="prefill", T=(1, 8, 12), B=(1, 1, 3), R=(1, 1, 5), M=(1, 8, 10), P=(1, 40, 60))
SIZES = (SegmentProfile(T=(1, 4, 4), R=(1, 4, 4)), SegmentProfile(T=(1, 8, 12), R=(1, 4, 6)))


def _manifest() -> Manifest:
    return Manifest(
        model=ModelSection(name="tiny", architecture="Tiny", vocab_size=tiny.V, context_length=tiny.CONTEXT),
        source=SourceSection(kind="module", name="tiny"),
        targets=(),
    )


def _engine(writer: BundleWriter, target: str, name: str, phase: str = "both") -> EngineSection:
    data = rtx_plan(f"{target} {name}".encode(), 0b1100)
    writer.write_bytes(f"targets/{target}/{name}.plan", data)
    digest = hashlib.sha256(data).hexdigest()
    return EngineSection(file=f"{name}.plan", bytes=len(data), sha256=digest, phase=phase)  # type: ignore[arg-type]


def write_paged(
    path: Path, phases: tuple[str, ...] = ("decode", "prefill"), kernels: Mapping[str, bytes] = MappingProxyType({})
) -> Path:
    """TensorRT proper: an engine for each phase. ``kernels``: files of some that it carries."""
    with BundleWriter(path) as writer:
        for name, data in kernels.items():
            writer.write_bytes(f"targets/tensorrt/kernels/{name}", data)
        for name, data in TokenizerFiles().to_files().items():
            writer.write_bytes(name, data)
        engines = tuple(_engine(writer, "tensorrt", phase, phase) for phase in phases)
        for phase in phases:
            MODELS[f"tensorrt {phase}".encode()] = paged.whole()
        section = TensorRtSection(
            flavour="tensorrt",
            version="11.4.0.106",
            compute_capabilities=("8.9",),
            dtype="f32",
            engines=engines,
            paged=PagedSection(
                library="11.0",
                cache_groups=tuple(g.stored_as("f32") for g in paged.GROUPS),
                profiles=(DECODE, PREFILL),
                kernel_capabilities=("8.9",),
                split_keys=8,
            ),
        )
        writer.commit(_manifest(), {"tensorrt": TargetManifest(sections={"tensorrt": section})})
    return path


def schedule(stems: dict[str, list[tuple[str, ...]]]) -> SegmentSchedule:
    """``stems``: capability -> those of each layer's kernels, in the order in which they are launched."""
    tensor_of = {"FLOAT": "f32", "INT32": "i32"}

    def tensors(described) -> dict:
        return {name: {"dtype": tensor_of[kind], "shape": shape} for name, (kind, shape) in described.items()}

    steps_found, buffers = [], {"logits": {"dtype": "f32", "shape": ("R", tiny.V)}}
    for name, (model, weights) in paged.segments().items():
        activations = {n: d for n, d in model.inputs.items() if n not in weights}
        inputs = {n: model.inputs[n] for n in weights}
        parts = {"inputs": tensors(activations), "weights": tensors(inputs), "outputs": tensors(model.outputs)}
        steps_found.append({"name": name, "file": f"{name}.plan", **parts})
        buffers |= {n: t for n, t in {**parts["inputs"], **parts["outputs"]}.items() if t["dtype"] == "f32"}
    kernels = [
        {"layers": [layer], "compute_capability": gpu, "write": w, "prefill": [p], "decode": [d], "combine": c}
        for gpu, layers in stems.items()
        for layer, (w, p, d, c) in enumerate(layers)
    ]
    heads = {n: n for n in "qkv"}

    def attention(layer: int) -> dict:
        group = paged.GROUPS[layer]
        where = {"layer": layer, "group": group.name, "scale": paged.SCALE, "window": group.window}
        return {"op": "attention", **where, **heads, "out": "a"}

    def own(layer: int) -> dict[str, str]:
        return {f"w{n}": f"{n}{layer}" for n in "qkv"}

    steps = [
        {
            **{"op": "segment", "segment": "first", "inputs": {"ids": "ids", "positions": "positions"}},
            **{"weights": {"embed": "embed"} | own(0), "outputs": {"x": "x"} | heads},
        },
        attention(0),
        {
            **{"op": "segment", "segment": "middle", "inputs": {"x": "x", "a": "a", "positions": "positions"}},
            **{"weights": {"o": "o0"} | own(1), "outputs": {"y": "y"} | heads},
        },
        attention(1),
        {
            **{"op": "segment", "segment": "last", "inputs": {"x": "y", "a": "a", "rows": "rows"}},
            **{"weights": {"o": "o1", "head": "head"}, "outputs": {"logits": "logits"}},
        },
    ]
    groups = [g.stored_as("f32").model_dump() for g in paged.GROUPS]
    document = {"dtype": "f32", "cache_groups": groups, "profiles": [s.model_dump() for s in SIZES]}
    return SegmentSchedule.model_validate(
        document | {"segments": steps_found, "buffers": buffers, "steps": steps, "kernels": kernels}
    )


def write_segments(path: Path, kernels: Mapping[str, bytes] = MappingProxyType({})) -> Path:
    """TensorRT-RTX between kernels, for the GPUs that plans are for. ``kernels``: files of others that it carries."""
    capabilities = ("8.6", "8.9")
    paged.know_kernels()
    target = "tensorrt-rtx"
    with BundleWriter(path) as writer:
        for name, data in TokenizerFiles().to_files().items():
            writer.write_bytes(name, data)
        for name, (model, _) in paged.segments().items():
            MODELS[f"{target} {name}".encode()] = model
        engines = tuple(_engine(writer, target, name) for name in paged.segments())
        for name, value in tiny.weights().items():
            writer.weights().add(name, value)
        files, stems = dict(kernels), {}
        for capability in capabilities:
            layers = [paged.compiled(int(capability.replace(".", "")), group) for group in paged.GROUPS]
            stems[capability] = [_first_of_each([k.spec.stem for k in layer]) for layer in layers]
            for kernel in (k for layer in layers for k in layer):
                files |= files_of(kernel)
        for name, data in files.items():
            writer.write_bytes(f"targets/{target}/kernels/{name}", data)
        writer.write_text(segments_path(target), schedule(stems).to_json())
        section = TensorRtSection(
            flavour="rtx",
            form="segments",
            version="1.7.1.116",
            compute_capabilities=capabilities,
            dtype="f32",
            engines=engines,
        )
        writer.commit(_manifest(), {target: TargetManifest(sections={"tensorrt": section})})
    return path


def _first_of_each(stems: list[str]) -> tuple[str, ...]:
    """Write, prefill, decode, combine: there are as many tiles for prefill as for decode."""
    tiles = (len(stems) - 2) // 2
    return stems[0], stems[1], stems[1 + tiles], stems[-1]
