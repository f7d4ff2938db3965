"""The file targets/NAME/segments.json: a model as small engines, with our own attention between them.

A *segment* is the part of the model between two attentions. Equal segments share one engine, whose weights are inputs;
the steps name the weights. Sizes of tensors are numbers or

    T  tokens of the step, packed as in ``contracts.StepInput``
    R  rows whose logits are needed

docs/inside/engine-files.md describes the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from msgspec import Meta

from enginewright.runtime.bundle.manifest import (
    BundlePath,
    FileSection,
    target_folder,
    target_manifest_path,
)
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import INDEX_PATH, WeightsIndex
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.records import Count, Record, parse_versioned, read

from .plan import HEADER_BYTES, PlanHeader, check_plan
from .section import Capability, Range, TensorRtSection, check_ranges

FORMAT_VERSION = 1
SEGMENTS_FILE = "segments.json"
"""The file's name in a target's folder."""

LOGITS = "logits"
"""The name of the buffer [R, V] of 32-bit floats that holds the result of a step."""

STEP_INPUTS = ("ids", "positions", "rows")
"""The arrays of a ``contracts.StepInput`` that segments read: i32 [T], [T] and [R]."""

TensorDtype = Literal["f32", "f16", "bf16", "fp8", "i64", "i32", "i8", "i4", "u8", "bool"]
"""The types of tensors. fp8 is e4m3. A byte of i4 has two values, the first in its low half; engines that take such
weights as bytes have u8 [.., K/2].
"""

Size = int | Literal["T", "R"]


class SegmentTensor(Record, frozen=True, kw_only=True):
    """A tensor's type and shape, row-major without holes."""

    dtype: TensorDtype
    shape: tuple[Size, ...]

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


class Segment(Record, frozen=True, kw_only=True):
    """An engine that computes a part of the program.

    Attributes:
        name: the name by which steps refer to the engine.
        file: the engine's file, in the target's folder.
        inputs: name of an input for activations in the engine -> its type and shape.
        weights: name of an input for weights in the engine -> its type and shape, which is fixed.
        outputs: name of an output in the engine -> its type and shape.
    """

    name: str
    file: BundlePath
    inputs: dict[str, SegmentTensor]
    weights: dict[str, SegmentTensor]
    outputs: dict[str, SegmentTensor]


class SegmentStep(Record, frozen=True, kw_only=True, tag_field="op", tag="segment"):
    """A run of a segment's engine.

    Attributes:
        segment: the segment's name.
        inputs: the engine's name of each input -> a buffer or step input.
        weights: the engine's name of each weight -> a tensor of the bundle.
        outputs: the engine's name of each output -> a buffer that isn't among the inputs.
    """

    segment: str
    inputs: dict[str, str]
    weights: dict[str, str]
    outputs: dict[str, str]


class AttentionStep(Record, frozen=True, kw_only=True, tag_field="op", tag="attention"):
    """Writes ``k`` and ``v`` into a layer's cache and computes attention of ``q`` over it: ``ew.kv_write`` and
    ``ew.paged_attention``.

    Attributes:
        layer, group: the layer and its cache group.
        q, k, v: buffers [T, Nq, D], [T, Nkv, D] and [T, Nkv, Dv].
        out: a buffer [T, Nq, Dv].
        scale, window, softcap: see ``ew.paged_attention``.
        sinks, slopes: the names of weights f32 [Nq] of the bundle; None if the model has none.
    """

    layer: Count
    group: str
    q: str
    k: str
    v: str
    out: str
    scale: float
    window: Count = 0
    softcap: float = 0.0
    sinks: str | None = None
    slopes: str | None = None


Step = SegmentStep | AttentionStep


class SegmentProfile(Record, frozen=True, kw_only=True):
    """An optimization profile: the ranges of tokens T and rows R of a step. Every engine has the same profiles, in this
    order.
    """

    T: Range
    R: Range

    def __post_init__(self) -> None:
        check_ranges(T=self.T, R=self.R)

    def holds(self, tokens: int, rows: int) -> bool:
        """Returns True if a step of these sizes is within the profile."""
        return self.T[0] <= tokens <= self.T[2] and self.R[0] <= rows <= self.R[2]


class AttentionKernels(Record, frozen=True, kw_only=True):
    """The kernels of ``layers`` on GPUs of one compute capability, as stems of files in the target's folder
    ``kernels``.

    ``prefill`` and ``decode`` have variants with different tiles, the default first. ``combine`` runs after ``decode``.
    """

    layers: Annotated[tuple[int, ...], Meta(min_length=1)]
    compute_capability: Capability
    write: str
    prefill: Annotated[tuple[str, ...], Meta(min_length=1)]
    decode: Annotated[tuple[str, ...], Meta(min_length=1)]
    combine: str

    @property
    def stems(self) -> tuple[str, ...]:
        """The stems of all kernels' files."""
        return (self.write, *self.prefill, *self.decode, self.combine)


class SegmentSchedule(Record, frozen=True, kw_only=True):
    """The engines, attentions and buffers of a whole step.

    Attributes:
        dtype: the type of activations and weights, and of caches that don't have 8 bits.
        cache_groups: the cache groups in the program's order.
        profiles: the profiles of every engine.
        segments: the engines, in the order in which steps first run them.
        buffers: the buffers by name; values that are used one after the other share one.
        steps: the steps in order.
        kernels: the kernels for each shape of attention and GPU.
        summed_products: the number of products summed on the way to a logit, which bounds the rounding error.
    """

    format_version: int = FORMAT_VERSION
    dtype: Literal["f32", "f16", "bf16"]
    cache_groups: tuple[CacheGroup, ...]
    profiles: Annotated[tuple[SegmentProfile, ...], Meta(min_length=1)]
    segments: Annotated[tuple[Segment, ...], Meta(min_length=1)]
    buffers: dict[str, SegmentTensor]
    steps: Annotated[tuple[Step, ...], Meta(min_length=1)]
    kernels: tuple[AttentionKernels, ...] = ()
    summed_products: Count = 0

    def __post_init__(self) -> None:
        segments = {segment.name: segment for segment in self.segments}
        if len(segments) < len(self.segments):
            raise ValueError("segments: one name comes twice")
        written: set[str] = set()
        attended: list[int] = []
        for i, step in enumerate(self.steps):
            at = f"steps.{i}"
            if isinstance(step, AttentionStep):
                self._check_attention(step, at, written)
                attended.append(step.layer)
                written.add(step.out)
            else:
                if step.segment not in segments:
                    raise ValueError(f"{at}: there is no segment {step.segment!r}")
                self._check_segment(step, segments[step.segment], at, written)
                written.update(step.outputs.values())
        if self.buffers.get(LOGITS) is None or LOGITS not in written:
            raise ValueError(f"no step writes the buffer {LOGITS!r}")
        layers = [layer for group in self.cache_groups for layer in group.layers]
        if sorted(attended) != sorted(layers):
            raise ValueError(f"steps attend in the layers {sorted(attended)}, and cache_groups have {sorted(layers)}")
        by_gpu: dict[str, list[int]] = {}
        for kernels in self.kernels:
            by_gpu.setdefault(kernels.compute_capability, []).extend(kernels.layers)
        for gpu, some in by_gpu.items():
            if sorted(some) != sorted(layers):
                raise ValueError(f"kernels: those for {gpu} are of the layers {sorted(some)}, not of {sorted(layers)}")

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The names of the bundle's weights that steps read, each once."""
        names: dict[str, None] = {}
        for step in self.steps:
            if isinstance(step, AttentionStep):
                names |= {name: None for name in (step.sinks, step.slopes) if name is not None}
            else:
                names |= dict.fromkeys(step.weights.values())
        return tuple(names)

    def _check_segment(self, step: SegmentStep, segment: Segment, at: str, written: set[str]) -> None:
        _same_names(f"{at}.inputs", step.inputs, segment.inputs)
        _same_names(f"{at}.weights", step.weights, segment.weights)
        _same_names(f"{at}.outputs", step.outputs, segment.outputs)
        for name, source in step.inputs.items():
            self._check_tensor(f"{at}.inputs.{name}", source, segment.inputs[name], written)
        for name, result in step.outputs.items():
            self._check_tensor(f"{at}.outputs.{name}", result, segment.outputs[name], None)
        results = list(step.outputs.values())
        if len(set(results)) < len(results) or set(results) & set(step.inputs.values()):
            raise ValueError(f"{at}.outputs: a buffer is written twice, or read and written")

    def _check_attention(self, step: AttentionStep, at: str, written: set[str]) -> None:
        group = next((g for g in self.cache_groups if g.name == step.group), None)
        if group is None or step.layer not in group.layers:
            raise ValueError(f"{at}: no cache group {step.group!r} has the layer {step.layer}")
        q = self.buffers.get(step.q)
        heads = q.shape[1] if q is not None and len(q.shape) == 3 else 0
        keys, values = group.planes
        shapes: dict[str, tuple[Size, ...]] = {
            "q": ("T", heads, keys.size),
            "k": ("T", *keys.shape),
            "v": ("T", *values.shape),
        }
        for name, shape in shapes.items():
            tensor = SegmentTensor(dtype=self.dtype, shape=shape)
            self._check_tensor(f"{at}.{name}", getattr(step, name), tensor, written)
        out = SegmentTensor(dtype=self.dtype, shape=("T", heads, values.size))
        self._check_tensor(f"{at}.out", step.out, out, None)

    def _check_tensor(self, at: str, name: str, wanted: SegmentTensor, written: set[str] | None) -> None:
        """Raises ValueError, whose message begins with ``at``, if the buffer or step input ``name`` isn't of the type
        and shape ``wanted``.

        ``written``: the buffers that earlier steps wrote, for a tensor that is read; None for one that is written.
        """
        if written is not None and name in STEP_INPUTS:
            actual = SegmentTensor(dtype="i32", shape=("R",) if name == "rows" else ("T",))
        elif name not in self.buffers:
            raise ValueError(f"{at}: there is no buffer {name!r}")
        elif written is not None and name not in written:
            raise ValueError(f"{at}: nothing has written the buffer {name!r} by then")
        else:
            actual = self.buffers[name]
        if actual != wanted:
            raise ValueError(f"{at}: {name!r} is {actual}, and {wanted} is needed")

    # ---- the bundle around it

    def check_weights(self, index: WeightsIndex, source: str) -> None:
        """Raises BundleError naming ``source``, the step and the weight if a weight is missing, or has another type or
        shape.
        """
        segments = {segment.name: segment for segment in self.segments}
        for i, step in enumerate(self.steps):
            needed: Iterable[tuple[str, SegmentTensor]]
            if isinstance(step, AttentionStep):
                heads = self.buffers[step.q].shape[1]
                of_heads = SegmentTensor(dtype="f32", shape=(heads,))
                needed = [(name, of_heads) for name in (step.sinks, step.slopes) if name is not None]
            else:
                needed = [(name, segments[step.segment].weights[argument]) for argument, name in step.weights.items()]
            for name, tensor in needed:
                _check_weight(index, name, tensor, f"{source}: steps.{i}")

    def check_engines(self, section: TensorRtSection, source: str) -> None:
        """Raises BundleError naming ``source`` if the engines in the target's manifest differ from the schedule's."""
        in_schedule = {
            "engines": sorted(segment.file for segment in self.segments),
            "dtype": self.dtype,
            "compute_capabilities": sorted({k.compute_capability for k in self.kernels}),
        }
        in_manifest = {
            "engines": sorted(engine.file for engine in section.engines),
            "dtype": section.dtype,
            "compute_capabilities": sorted(section.compute_capabilities),
        }
        for field, value in in_manifest.items():
            if in_schedule[field] != value:
                raise BundleError(
                    f"{source}: {field}: they are {in_schedule[field]}, and {value} in the target's manifest",
                    hint="Export the bundle again.",
                )

    def check_files(self, target: str, files: Mapping[str, object], source: str) -> None:
        """Raises BundleError if an engine or a kernel isn't among the bundle's ``files``."""
        needed = [segment.file for segment in self.segments]
        needed += [kernel_file(stem, kind) for k in self.kernels for stem in k.stems for kind in ("json", "cubin")]
        for file in needed:
            if f"{target_folder(target)}/{file}" not in files:
                raise BundleError(
                    f"{source}: {file} is not listed in the target's manifest", hint="Export the bundle again."
                )

    def to_json(self) -> str:
        """Returns the schedule as JSON. Equal schedules give equal bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str) -> SegmentSchedule:
        """Parses a schedule. Raises BundleError naming ``source`` if it is invalid or has another format version."""
        return read(cls, parse_versioned(text, FORMAT_VERSION, source), source)


def segments_path(target: str) -> str:
    """Returns the path of a target's schedule inside the bundle."""
    return f"{target_folder(target)}/{SEGMENTS_FILE}"


def kernel_file(stem: str, kind: Literal["json", "cubin", "ptx"]) -> str:
    """Returns the path of a kernel's file inside the target's folder."""
    return f"kernels/{stem}.{kind}"


def _same_names(at: str, found: Mapping[str, str], wanted: Mapping[str, SegmentTensor]) -> None:
    if found.keys() != wanted.keys():
        raise ValueError(f"{at}: they are {sorted(found)}, and the segment has {sorted(wanted)}")


def _check_weight(index: WeightsIndex, name: str, wanted: SegmentTensor, source: str) -> None:
    entry = index.tensors.get(name)
    if entry is None:
        raise BundleError(f"{source}: weight {name!r} is not in {INDEX_PATH}", hint="Export the bundle again.")
    dtypes: tuple[str, ...] = (wanted.dtype,)
    shape: tuple[Size, ...] = wanted.shape
    if wanted.dtype == "u8":
        dtypes, shape = ("i4", "u4"), (*shape[:-1], *(2 * n for n in shape[-1:] if isinstance(n, int)))
    layout = "nibbles" if wanted.dtype in ("i4", "u8") else "rows"
    if entry.dtype not in dtypes or (entry.shape, entry.layout) != (shape, layout):
        raise BundleError(
            f"{source}: weight {name!r} has to be {wanted}, {INDEX_PATH} has {entry.dtype} {list(entry.shape)} in "
            f"{entry.layout}",
            hint="Export the bundle again.",
        )


def check_opened(bundle: Bundle, target: str) -> SegmentSchedule | None:
    """Checks a target's engines. Returns the schedule of its segments; None if it has another form.

    Raises BundleError if an engine's header, or a file of the schedule, differs from the manifest.
    """
    section = bundle.targets[target].section(TensorRtSection)
    if section is None:
        return None
    _check_plans(bundle, target, section)
    if section.form != "segments":
        return None
    path = segments_path(target)
    source = str(bundle.path / path)
    schedule = SegmentSchedule.from_json(bundle.read_bytes(path), source=source)
    schedule.check_engines(section, source)
    schedule.check_files(target, bundle.files, source)
    schedule.check_weights(bundle.index, source)
    return schedule


def _check_plans(bundle: Bundle, target: str, section: TensorRtSection) -> None:
    source = bundle.path / target_manifest_path(target)
    if not section.engines:
        raise BundleError(f"{source}: tensorrt.engines: there is none", hint="Export the bundle again.")
    for i, engine in enumerate(section.engines):
        name = f"{target_folder(target)}/{engine.file}"
        if bundle.files.get(name) != FileSection(bytes=engine.bytes, sha256=engine.sha256):
            raise BundleError(
                f"{source}: tensorrt.engines.{i}: {engine.file} is not listed in files with these bytes and sha256",
                hint="Export the bundle again.",
            )
        if section.flavour != "rtx":
            continue  # TensorRT's own plans have another header, which isn't known here
        check_plan(
            PlanHeader.parse(bundle.read_head(name, HEADER_BYTES), str(bundle.path / name)),
            str(bundle.path / name),
            size=engine.bytes,
            version=section.version,
            compute_capabilities=section.compute_capabilities,
        )


def schedule_of(bundle: Bundle, target: str) -> SegmentSchedule | None:
    """Returns the schedule that was read when the bundle was opened; None if the target doesn't have the segments
    form.
    """
    schedule = bundle.opened.get(target)
    return schedule if isinstance(schedule, SegmentSchedule) else None
