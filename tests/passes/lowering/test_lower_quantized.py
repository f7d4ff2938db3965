"""Quantized and bf16 programs, lowered, give what their evaluation gives; their weights are stored once."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import FormatOverride, WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.passes.quantization.cast_weights_to_bf16 import CastWeightsToBf16
from enginewright.passes.quantization.choose_formats import ChooseFormats
from enginewright.passes.quantization.quantize_embeddings import QuantizeEmbeddings
from enginewright.passes.quantization.quantize_linears import QuantizeLinears
from enginewright.passes.quantization.round_weights import RoundWeights
from tests.passes.lowering.lowered import check, features, interpreter, lower, ops
from tests.passes.quantization.test_choose_formats import routed
from tests.passes.small_programs import Linear, PagedEvaluation, Shape, Steps, decoder, program_from, random_sequences

ew = torch.ops.ew

F32, BF16 = WeightFormat(), WeightFormat(storage="bf16", activation="bf16")
INT8 = WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)
FP8, FP8_IN_GROUPS = WeightFormat(storage="fp8"), WeightFormat(storage="fp8", group_size=32)
INT4 = WeightFormat(storage="int4", group_size=32, activation="int8", activation_group_size=32)
FORMATS = {
    "bf16": BF16,
    "grouped": INT8,
    "per_channel": WeightFormat(storage="int8", activation="int8"),
    "weights": WeightFormat(storage="int8", group_size=64, activation="int8"),
    "activations": WeightFormat(storage="int8", activation="int8", activation_group_size=64),
}


def with_formats(program: Program, default: WeightFormat, *overrides: tuple[str, WeightFormat]) -> Program:
    formats = WeightFormats(
        default=default,
        overrides=tuple(FormatOverride(layers=path, format=weight_format) for path, weight_format in overrides),
    )
    for one in (ChooseFormats(), QuantizeLinears(), QuantizeEmbeddings(), CastWeightsToBf16()):
        one.run(program, PassContext(recipe=PassOptions(weights=formats)))
    return program


@pytest.mark.parametrize("format_name", list(FORMATS))
@pytest.mark.parametrize("hidden", [32, 70])
def test_decoder_equals_its_evaluation(format_name: str, hidden: int) -> None:
    shape = Shape(hidden=hidden, heads=8, kv_heads=8, head_size=6, intermediate=50, bias=(True, False, True))
    paged = with_formats(decoder(shape), FORMATS[format_name])
    lowering = lower(paged)
    machine, reference = interpreter(lowering), PagedEvaluation(paged)
    steps = Steps([g.name for g in paged.cache_groups])
    a, b = random_sequences((40, 3), 67)
    for chunks in ({"a": a[:7]}, {"a": a[7:38], "b": b[:2]}, {"b": b[2:], "a": a[38:]}):
        # bf16 products are float products of rounded factors, which BLAS sums by the shapes and strides that it sees;
        # a value that is rounded to 8 bits may then fall on the other side.
        tolerance = 2e-2 if format_name == "bf16" else 1e-4
        torch.testing.assert_close(machine.run(steps.step(chunks)), reference.run(chunks), rtol=0, atol=tolerance)


@pytest.mark.parametrize("wanted", [FP8, FP8_IN_GROUPS])
@pytest.mark.parametrize(("hidden", "tied"), [(32, True), (70, False)])
def test_a_decoder_of_8_bit_floats_equals_its_evaluation(hidden: int, tied: bool, wanted: WeightFormat) -> None:
    shape = Shape(hidden=hidden, heads=8, kv_heads=8, head_size=6, intermediate=50, bias=(True, False, True), tied=tied)
    paged = decoder(shape)
    for one in (ChooseFormats(), RoundWeights()):
        one.run(paged, PassContext(recipe=PassOptions(weights=WeightFormats(default=wanted))))
    lowering = lower(paged)
    stored = {use.name: (use.dtype, use.layout) for use in lowering.program.weights}
    assert {kind for name, kind in stored.items() if name.endswith(".fp8")} == {("fp8", "panel32")}
    assert {kind for name, kind in stored.items() if name.endswith(".scales")} == {("f16", "panel32")}
    linears = [s for s in lowering.program.steps if s.op == "linear"]
    assert {s.attrs["weight_group"] for s in linears} == {wanted.group_size}
    machine, reference = interpreter(lowering), PagedEvaluation(paged)
    steps = Steps([g.name for g in paged.cache_groups])
    a, b = random_sequences((40, 3), 67)
    for chunks in ({"a": a[:7]}, {"a": a[7:38], "b": b[:2]}, {"b": b[2:], "a": a[38:]}):
        # Float products, which BLAS sums by the shapes and strides that it sees.
        torch.testing.assert_close(machine.run(steps.step(chunks)), reference.run(chunks), rtol=0, atol=1e-4)


def test_steps_and_layouts_of_an_int8_decoder() -> None:
    program = lower(with_formats(decoder(Shape(windows=(0,), heads=8, kv_heads=8)), INT8)).program
    assert ops(program) == [
        "quantized_embedding",
        "rope_table",
        "rms_norm",
        "quantize_activation",
        *("quantized_linear",) * 3,
        *("rope",) * 2,
        "kv_write",
        "paged_attention",
        "quantize_activation",
        "quantized_linear",
        "elementwise:add",
        "rms_norm",
        "quantize_activation",
        "quantized_linear",
        "quantized_linear",
        "gated_activation",
        "quantize_activation",
        "quantized_linear",
        "elementwise:add",
        "rms_norm",
        "quantize_activation",
        "quantized_linear",
        "take_rows",
    ]
    gate, up, act = program.steps[16], program.steps[17], program.steps[18]
    assert gate.outputs[0].name == up.outputs[0].name == act.inputs[0].name, "both write into the cat's buffer"
    stored = {w.name: (w.dtype, w.shape, w.layout) for w in program.weights if w.name.startswith("embed")}
    assert stored == {
        "embed.int8": ("i8", (67, 32), "panel32x4"),
        "embed.scales": ("f16", (67, 1), "panel32"),
    }


@pytest.mark.parametrize(("hidden", "intermediate"), [(32, 64), (64, 96)])
@pytest.mark.parametrize("offsets", [False, True])
def test_a_decoder_of_4_bits_equals_its_evaluation(hidden: int, intermediate: int, offsets: bool) -> None:
    shape = Shape(hidden=hidden, heads=8, kv_heads=8, intermediate=intermediate, bias=(True, False, True))
    paged = with_formats(decoder(shape), INT4.model_copy(update={"zero_point": offsets}))
    lowering = lower(paged)
    machine, reference = interpreter(lowering), PagedEvaluation(paged)
    steps = Steps([g.name for g in paged.cache_groups])
    a, b = random_sequences((40, 3), 67)
    for chunks in ({"a": a[:7]}, {"a": a[7:], "b": b}):
        torch.testing.assert_close(machine.run(steps.step(chunks)), reference.run(chunks), rtol=0, atol=1e-4)
    integers = {w.layout for w in lowering.program.weights if w.dtype == ("u4" if offsets else "i4")}
    assert integers == {"panel32x8"}
    for step in lowering.program.steps:
        if step.op == "quantized_linear":
            assert step.attrs.get("has_offsets", False) == offsets
            assert step.attrs["weight_group"] == step.attrs["activation_group"] == 32
    stored = {w.name: (w.dtype, w.shape, w.layout) for w in lowering.program.weights if w.name.startswith("embed")}
    factors = ("f16", (67, hidden // 32), "panel32")
    expected = {"embed.int4": ("u4" if offsets else "i4", (67, hidden), "panel32x8"), "embed.scales": factors}
    assert stored == expected | ({"embed.offsets": factors} if offsets else {})


def test_a_head_of_8_bits_after_layers_of_4() -> None:
    formats = WeightFormats(default=INT4, embeddings=INT8)
    program = decoder(Shape(heads=8, kv_heads=8, intermediate=64))
    for one in (ChooseFormats(), QuantizeLinears(), QuantizeEmbeddings()):
        one.run(program, PassContext(recipe=PassOptions(weights=formats)))
    lowered = lower(program).program
    assert {w.dtype for w in lowered.weights if w.name.startswith("embed.int")} == {"i8"}
    assert {w.dtype for w in lowered.weights if w.name.endswith(".int4")} == {"i4"}


def test_a_tied_bf16_table_is_stored_once() -> None:
    tied = lower(with_formats(decoder(Shape(windows=(0,))), BF16)).program
    assert [(w.dtype, w.layout) for w in tied.weights if w.name.startswith("embed")] == [("bf16", "panel32x2")]
    untied = lower(with_formats(decoder(Shape(windows=(0,), tied=False)), BF16)).program
    assert {w.name: w.layout for w in untied.weights if w.name.startswith(("embed", "head"))} == {
        "embed.bf16": "rows",
        "head.bf16": "panel32x2",
    }
    assert ops(untied).count("cast_bf16") == 5


@pytest.mark.parametrize("offsets", [False, True])
def test_experts_of_4_bits(offsets: bool) -> None:
    program = check(with_formats(routed(), INT4.model_copy(update={"zero_point": offsets})), atol=1e-3)
    assert ops(program).count("quantized_grouped_linear") == 1
    (weight,) = (w for w in program.weights if w.name == "experts.int4")
    assert (weight.dtype, weight.layout, weight.shape) == ("u4" if offsets else "i4", "panel32x8", (64, 32, 32))


@pytest.mark.parametrize("format_name", ["bf16", "grouped", "per_channel"])
def test_experts(format_name: str) -> None:
    program = check(with_formats(routed(), FORMATS[format_name]), atol=1e-3)
    op, layout = {"bf16": ("grouped_linear", "panel32x2")}.get(format_name, ("quantized_grouped_linear", "panel32x4"))
    assert ops(program).count(op) == 1
    (weight,) = (w for w in program.weights if w.name in ("experts.bf16", "experts.int8"))
    assert (weight.layout, weight.shape) == (layout, (64, 32, 32))


@pytest.mark.parametrize("default", [BF16, INT8])
def test_inputs_of_rank_three_are_flattened(default: WeightFormat) -> None:
    inner = torch.nn.Module()
    inner.one = Linear(40, 10, bias=True)

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = torch.sin(features(i, 30)).view(-1, 3, 10)
        return ew.take_rows(m.one(x.transpose(1, 2).reshape(-1, 3, 10)).flatten(1), i["rows"])

    program = check(with_formats(program_from(call, inner), default), atol=1e-5)
    (step,) = (s for s in program.steps if s.op in ("cast_bf16", "quantize_activation"))
    assert [o.shape[0].t for o in step.outputs] == [3] * len(step.outputs)
    assert step.outputs[0].strides[0] == (10 if default == BF16 else 12)
