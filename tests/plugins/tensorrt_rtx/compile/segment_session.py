"""Runs a schedule on a CPU as its executor does on a GPU: onnxruntime for segments, passes/ops for what is between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper

from enginewright.passes.ir.program import Program
from enginewright.passes.ops.attention import paged_attention
from enginewright.passes.ops.cache import kv_write
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.engines.segments import LOGITS, STEP_INPUTS, AttentionStep, SegmentStep
from enginewright.plugins.graphs.float_types import FloatType
from enginewright.plugins.graphs.weights import ExternalWeights
from enginewright.plugins.tensorrt_rtx.compile.segment_graphs import SegmentedModel, SegmentGraph, segment_model
from enginewright.runtime.bundle.manifest import Manifest, ModelSection, SourceSection, TargetManifest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.progress import silent
from tests.passes.small_programs import Steps
from tests.plugins.graphs.linear_session import PLAN, SEQUENCES, Logits, tokens_of

POOL = 8
"""Blocks of a cache group."""

MANIFEST = Manifest(
    model=ModelSection(name="tiny", architecture="tiny", vocab_size=256, context_length=512),
    source=SourceSection(kind="module", name="tiny"),
    targets=(),
)


def emit_segments(program: Program, path: Path, floats: FloatType = "f32") -> tuple[SegmentedModel, Bundle]:
    """The segments of a program, checked, and a bundle with their weights."""
    with BundleWriter(path) as writer:
        model = segment_model(program, ExternalWeights(writer, silent, len(program.weights), "segments"), floats)
        writer.commit(MANIFEST, {"tensorrt-rtx": TargetManifest()})
    for graph in model.graphs:
        onnx.checker.check_model(onnx.load_from_string(graph.model), full_check=True)
    return model, Bundle.open(path)


class SegmentSession:
    """A paged cache, filled with NaN, and the engines' graphs."""

    def __init__(self, model: SegmentedModel, bundle: Bundle, groups: Sequence[CacheGroup]) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        self.model, self.bundle = model, bundle
        graphs = {graph.name: graph for graph in model.graphs}
        self.sessions = [
            onnxruntime.InferenceSession(
                self._with_constants(graphs[step.segment], step), options, providers=["CPUExecutionProvider"]
            )
            for step in model.steps
            if isinstance(step, SegmentStep)
        ]
        self.steps = Steps([group.name for group in groups], POOL)
        self.caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.blocks = {layer: group for group in groups for layer in group.layers}

    def run(self, chunks: Mapping[str, Sequence[int]]) -> Logits:
        """Appends tokens to requests in one step; logits of all of them [T, V]."""
        inputs = self.steps.step(chunks, range(sum(map(len, chunks.values()))))
        buffers = {name: inputs[name].numpy().astype(np.int32) for name in STEP_INPUTS}
        sessions = iter(self.sessions)
        for step in self.model.steps:
            if isinstance(step, AttentionStep):
                buffers[step.out] = self._attend(step, buffers, inputs)
                continue
            feeds = {name: buffers[source] for name, source in step.inputs.items()}
            session = next(sessions)
            names_of_inputs = {entry.name for entry in session.get_inputs()}
            feeds |= {
                name: self.bundle.weight(source) for name, source in step.weights.items() if name in names_of_inputs
            }
            outputs = session.run(list(step.outputs), feeds)
            buffers.update(zip(step.outputs.values(), outputs, strict=True))
        logits: Logits = buffers[LOGITS]
        return logits

    def _with_constants(self, graph: SegmentGraph, step: SegmentStep) -> bytes:
        """A graph that has those weights in it of whose types numpy knows nothing."""
        model = onnx.load_from_string(graph.model)
        for entry in list(model.graph.input):
            tensor = graph.weights.get(entry.name)
            if tensor is not None and tensor.dtype in ("i4", "u8", "fp8"):
                raw = self.bundle.weight(step.weights[entry.name]).tobytes()
                kind = entry.type.tensor_type.elem_type
                model.graph.initializer.append(helper.make_tensor(entry.name, kind, tensor.shape, raw, raw=True))
                model.graph.input.remove(entry)
        serialized: bytes = model.SerializeToString()
        return serialized

    def _attend(self, step: AttentionStep, buffers: Mapping[str, Logits], given: Mapping[str, torch.Tensor]) -> Logits:
        q, k, v = (torch.from_numpy(buffers[name]) for name in (step.q, step.k, step.v))
        group = self.blocks[step.layer]
        if step.layer not in self.caches:
            sizes = (group.key_head_size, group.value_head_size)
            key, value = (
                torch.full((POOL, group.block_size, group.kv_heads, size), torch.nan, dtype=q.dtype) for size in sizes
            )
            self.caches[step.layer] = key, value
        caches = kv_write(*self.caches[step.layer], k, v, given[f"slots:{step.group}"])
        self.caches[step.layer] = caches
        sinks, slopes = (
            None if name is None else torch.from_numpy(np.array(self.bundle.weight(name)))
            for name in (step.sinks, step.slopes)
        )
        table = given[f"block_table:{step.group}"]
        out = paged_attention(
            *(q, *caches, table, given["q_start"], given["kv_len"], step.scale, step.window, step.softcap),
            *(sinks, slopes),
        )
        return out.numpy()


def run_plan(session: SegmentSession) -> dict[int, Logits]:
    """Logits after each token of two requests: a ragged prefill, a second one behind it, and decode steps."""
    by_slot: dict[int, list[Logits]] = {slot: [] for slot in SEQUENCES}
    done = dict.fromkeys(SEQUENCES, 0)
    for counts in PLAN:
        chunks = {str(slot): tokens_of(slot)[done[slot] : done[slot] + n] for slot, n in counts.items()}
        logits, at = session.run(chunks), 0
        for slot, n in counts.items():
            by_slot[slot].append(logits[at : at + n])
            done[slot], at = done[slot] + n, at + n
    return {slot: np.concatenate(parts) for slot, parts in by_slot.items()}
