"""The form of fp8 weights in the graph, as onnxruntime and TensorRT-RTX take it; numbers: test_ops_quantized.py."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.passes.quantization.choose_formats import ChooseFormats
from enginewright.passes.quantization.round_weights import RoundWeights
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.engines.segments import SegmentStep
from enginewright.plugins.graphs.emit_model import emit_model
from enginewright.plugins.graphs.weights import ExternalWeights
from enginewright.plugins.tensorrt_rtx.compile.segment_graphs import segment_model
from enginewright.runtime.bundle.weights import WeightsIndex
from enginewright.runtime.shared.progress import silent
from tests.passes.small_programs import Shape, decoder
from tests.plugins.graphs.linear_session import emit


def fp8(group_size: int, tied: bool) -> Program:
    program = decoder(Shape(hidden=64, heads=8, kv_heads=8, intermediate=96, tied=tied))
    context = PassContext(
        recipe=PassOptions(weights=WeightFormats(default=WeightFormat(storage="fp8", group_size=group_size)))
    )
    for one in (LowerAttention(), ChooseFormats(), RoundWeights()):
        one.run(program, context)
    return program


@pytest.mark.parametrize(("group", "tied"), [(0, True), (0, False), (32, True), (32, False)])
def test_one_dequantize_linear_for_each_weight(group: int, tied: bool, tmp_path: Path) -> None:
    emit(fp8(group, tied), tmp_path)
    graph = onnx.load(tmp_path / "model.onnx", load_external_data=False).graph
    stored = {t.name: t for t in graph.initializer}
    dequantized = {n.output[0]: n for n in graph.node if n.op_type == "DequantizeLinear"}
    assert len(dequantized) == 2 * 7 + (1 if tied else 2)
    for node in dequantized.values():
        codes = stored[node.input[0]]
        assert codes.data_type == TensorProto.FLOAT8E4M3FN
        attributes = {a.name: a.i for a in node.attribute}
        columns = codes.name.endswith(".columns")
        if group:  # blocks lie along K
            assert attributes == {"axis": 0 if columns else 1, "block_size": 32}
        else:  # one scale for an output channel, whose axis is N
            assert attributes == {"axis": 1 if columns else 0}
    readers = {name: sorted(n.op_type for n in graph.node if name in n.input) for name in dequantized}
    tables = [kinds for name, kinds in readers.items() if dequantized[name].input[0] == "embed.fp8.onnx"]
    assert tables == [["Gather", "Gemm"] if tied else ["Gather"]]
    index = WeightsIndex.from_json((tmp_path / "weights/index.json").read_text())
    assert index.format_version == 4
    embeds = {name: t.dtype for name, t in index.tensors.items() if name.startswith("embed")}
    assert embeds == {"embed.fp8.onnx": "fp8", "embed.scales.onnx": "f32"}, "a tied table is stored once"


@pytest.mark.parametrize("group", [0, 32])
def test_tensorrt_rtx_builds_it_in_f16_for_gpus_that_have_it(group: int, tmp_path: Path) -> None:
    """Nothing of it is run: there is no GPU here."""
    pytest.importorskip(
        "tensorrt_rtx", reason="tensorrt_rtx is not installed: pip install 'enginewright[tensorrt-rtx]'"
    )
    from enginewright.plugins.tensorrt_rtx.compile.build_engine import EngineRequest, build_engine

    with BundleWriter(tmp_path / "b") as writer:
        emit_model(fp8(group, tied=True), writer, silent, "f16", 16)
        writer.finish_weights()
        graph = onnx.load(writer.folder / "model.onnx", load_external_data=False).graph
        request = EngineRequest(
            graph=writer.folder / "model.onnx",
            plan=tmp_path / "model.plan",
            compute_capabilities=("8.9", "12.0"),
            profiles=({"B": (1, 1, 2), "S": (1, 1, 1), "R": (1, 1, 2)},),
            lengths=True,
            name="target tensorrt-rtx",
            inputs=tuple(value.name for value in graph.input),
            outputs=tuple(value.name for value in graph.output),
        )
        built = build_engine(request, lambda *_: None)
    assert built.attentions == 2
    assert request.plan.stat().st_size > 0


def test_segments_take_the_codes_as_inputs(tmp_path: Path) -> None:
    """A tied table is dequantized where its rows are gathered and where they are multiplied: none goes from one segment
    to the next."""
    with BundleWriter(tmp_path / "b") as writer:
        model = segment_model(fp8(0, tied=True), ExternalWeights(writer, silent, 1), "f16")
    first, *_, last = model.steps
    assert isinstance(first, SegmentStep) and isinstance(last, SegmentStep)
    for step in (first, last):
        assert {"embed.fp8.onnx", "embed.scales.onnx"} <= set(step.weights.values())
    assert all(buffer.shape[0] in ("T", "R") for buffer in model.buffers.values())
