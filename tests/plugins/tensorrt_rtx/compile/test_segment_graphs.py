"""Segments as graphs: equal ones are one, and a step over them gives transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from enginewright.optimizer.verify.random_tokens import tolerance_of
from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.plugins.engines.segments import AttentionStep, SegmentStep
from tests.acceptance.tiny_configs import tiny_family
from tests.passes.small_programs import Shape, decoder
from tests.plugins.graphs.linear_session import LinearSession, emit, lowered, reference_logits
from tests.plugins.graphs.linear_session import run_plan as linear_plan
from tests.plugins.graphs.test_ops_quantized import FP8, INT4_OFFSETS, INT8, INT8_GROUPS
from tests.plugins.tensorrt_rtx.compile.segment_session import SegmentSession, emit_segments, run_plan

ew = torch.ops.ew

# What each has that the others don't, at two sizes of heads and layers: a tied table; rotations of a part of the heads,
# biases, and a feed-forward layer beside attention; a softcap and windows; sinks, and experts with limits and biases;
# value heads of a size of their own.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6, "tie_word_embeddings": True}),
    "gpt_neox": ({}, {"num_hidden_layers": 3, "hidden_size": 128}),
    "gemma2": ({}, {"num_hidden_layers": 4, "head_dim": 32}),
    "gpt_oss": ({}, {"num_hidden_layers": 3, "head_dim": 32}),
    "deepseek_v3": ({}, {"num_hidden_layers": 3, "v_head_dim": 16}),
}


def paged(layers: int) -> Program:
    program = decoder(Shape(windows=(0,) * layers, tied=False))
    LowerAttention().run(program, PassContext())
    return program


# Of gpt_oss the test of half floats has the other size.
@pytest.mark.parametrize(
    ("family", "size"), [(f, size) for f in FAMILIES for size in (0, 1) if (f, size) != ("gpt_oss", 0)]
)
def test_a_step_over_segments_gives_transformers_logits(family: str, size: int, tmp_path: Path) -> None:
    model = tiny_family(family, **FAMILIES[family][size])
    program = lowered(model)
    stages, bundle = emit_segments(program, tmp_path / "b")
    logits = run_plan(SegmentSession(stages, bundle, program.cache_groups))
    for slot, expected in reference_logits(model).items():
        allowed = tolerance_of(stages.summed_products) * float(np.abs(expected).max())
        np.testing.assert_allclose(logits[slot], expected, rtol=0, atol=allowed)


@pytest.mark.parametrize(
    ("family", "default", "embeddings", "kinds"),
    [
        ("llama", INT8, INT8_GROUPS, {"i8"}),
        ("mixtral", INT4_OFFSETS, None, {"i4", "u8"}),  # a table of bytes
        ("gemma2", FP8, None, {"fp8"}),  # tied: a table that both ends read
    ],
)
def test_weights_of_fewer_bits_are_the_onnx_targets(
    family: str, default: WeightFormat, embeddings: WeightFormat | None, kinds: set[str], tmp_path: Path
) -> None:
    formats = WeightFormats(default=default, embeddings=embeddings)
    program = lowered(tiny_family(family), PassContext(recipe=PassOptions(weights=formats)))
    stages, bundle = emit_segments(program, tmp_path / "b")
    assert {tensor.dtype for graph in stages.graphs for tensor in graph.weights.values()} - {"f32"} == kinds
    logits = run_plan(SegmentSession(stages, bundle, program.cache_groups))
    # The whole file computes the same sums, with attention by ONNX's operators.
    for slot, expected in linear_plan(LinearSession(tmp_path, emit(program, tmp_path))).items():
        allowed = tolerance_of(stages.summed_products) * float(np.abs(expected).max())
        np.testing.assert_allclose(logits[slot], expected, rtol=0, atol=allowed)


def test_half_floats_are_as_near_as_they_can_be(tmp_path: Path) -> None:
    model = tiny_family("gpt_oss")
    program = lowered(model)
    stages, bundle = emit_segments(program, tmp_path / "b", "f16")
    assert {buffer.dtype for buffer in stages.buffers.values()} == {"f16", "f32"}  # rotations' tables, and logits
    logits = run_plan(SegmentSession(stages, bundle, program.cache_groups))
    for slot, expected in reference_logits(model).items():
        # Half an ulp of f16 is 2**-11; some dozen roundings in a row add up, to 0.3 % of the largest logit here.
        np.testing.assert_allclose(logits[slot], expected, rtol=0, atol=0.01 * float(np.abs(expected).max()))


@pytest.mark.parametrize("layers", [3, 5])
def test_layers_of_one_shape_share_a_graph(layers: int, tmp_path: Path) -> None:
    stages, bundle = emit_segments(paged(layers), tmp_path / "b")
    runs = [step for step in stages.steps if isinstance(step, SegmentStep)]
    assert [step.segment for step in runs] == ["segment_0", *["segment_1"] * (layers - 1), "segment_2"]
    assert [step.layer for step in stages.steps if isinstance(step, AttentionStep)] == list(range(layers))
    # Each layer has weights of its own, and as many buffers do for any number of layers.
    read = [label for step in runs for label in step.weights.values()]
    assert len(read) == len(set(read)) and set(read) == set(bundle.index.tensors)
    assert len(stages.buffers) == 8
    middle = stages.graphs[1]
    assert set(middle.outputs) == {"q", "k", "v", "y_0"}
    graph = onnx.load_from_string(middle.model).graph
    assert {value.name for value in graph.input} == {*middle.inputs, *middle.weights}
    assert sum(len(t.raw_data) for t in graph.initializer) < 1000


def test_a_layer_that_differs_has_its_own(tmp_path: Path) -> None:
    program = paged(4)
    norm = program.nodes_of(ew.rms_norm.default)[3]  # behind the second layer's attention
    norm.args = (*norm.args[:2], 0.1)
    stages, _ = emit_segments(program, tmp_path / "b")
    runs = [step.segment for step in stages.steps if isinstance(step, SegmentStep)]
    assert runs == ["segment_0", "segment_1", "segment_2", "segment_1", "segment_3"]


def test_the_same_program_gives_the_same_bytes(tmp_path: Path) -> None:
    stages = [emit_segments(paged(2), tmp_path / name)[0] for name in "ab"]
    assert stages[0] == stages[1]
