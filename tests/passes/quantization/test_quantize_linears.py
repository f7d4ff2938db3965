from __future__ import annotations

import pytest
import torch

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import FormatOverride, WeightFormats
from enginewright.passes.fusion.fuse_gate_up import FuseGateUp
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.quantized import QuantizedOffsets, QuantizedScales, QuantizedValues
from enginewright.passes.quantization.choose_formats import ChooseFormats
from enginewright.passes.quantization.quantize_linears import QuantizeLinears
from enginewright.runtime.shared.errors import PassError
from tests.passes.quantization.test_choose_formats import F32, INT4, INT4_64, INT8, PER_CHANNEL, routed
from tests.passes.rewriting import op_counts
from tests.passes.small_programs import Shape, decoder, evaluate, random_sequences, whole_inputs

ew = torch.ops.ew


def run(program: Program, default: WeightFormat, *overrides: tuple[str, WeightFormat]) -> int:
    formats = WeightFormats(
        default=default, overrides=tuple(FormatOverride(layers=path, format=one) for path, one in overrides)
    )
    context = PassContext(recipe=PassOptions(weights=formats))
    ChooseFormats().run(program, context)
    return QuantizeLinears().run(program, context).matched


CLOSENESS = {INT8: 0.05, PER_CHANNEL: 0.05, INT4: 0.3, INT4_64: 0.3}
"""Some 15 products in a row, each about a percent off; with four bits, 8 percent."""


@pytest.mark.parametrize("default", CLOSENESS, ids=str)
@pytest.mark.parametrize("lengths", [(5,), (3, 8, 1)])
def test_a_decoder_is_close_to_its_float_form(default: WeightFormat, lengths: tuple[int, ...]) -> None:
    shape = Shape(hidden=64, heads=8, kv_heads=8, intermediate=64, tied=False, bias=(True, False, True))
    exact = decoder(shape)
    program = exact.copy()
    assert run(program, default) == 2 * 7 + 1
    counts = op_counts(program)
    assert counts["ew.linear"] == 0
    assert counts["ew.quantized_linear"] == 15
    assert counts["ew.quantize_activation"] == 2 * 4 + 1, "q, k, v share an input, and gate and up do"
    inputs = whole_inputs(random_sequences(lengths, 67))
    want, got = evaluate(exact, inputs), evaluate(program, inputs)
    assert 0 < (got - want).norm() / want.norm() < CLOSENESS[default]
    for node in program.nodes_of(ew.quantized_linear.default):
        arguments = bound_arguments(node)
        assert arguments["weight_bits"] == (4 if default.storage == "int4" else 8)
        assert (arguments["weight_group"], arguments["activation_group"]) == (
            default.group_size,
            default.activation_group_size,
        )
        assert (arguments["weight_offsets"] is not None) == default.zero_point


def test_weights_are_lazy_and_know_their_sources() -> None:
    program = decoder(Shape())
    FuseGateUp().run(program, PassContext())
    run(program, INT8)
    name = "layers.0.gate_proj+up_proj.weight"
    values, scales = program.weights[f"{name}.int8"], program.weights[f"{name}.scales"]
    assert isinstance(values, QuantizedValues)
    assert isinstance(scales, QuantizedScales)
    assert values.shape == (96, 32)
    assert scales.shape == (96, 1)
    assert [p.source for p in values.parts(0)] == ["layers.0.gate_proj.weight", "layers.0.up_proj.weight"]
    assert name not in program.weights, "nothing reads the floats any more"


def test_the_integers_of_4_bits_have_names_of_their_own() -> None:
    program = decoder(Shape(hidden=64, heads=8, kv_heads=8, intermediate=64))
    run(program, INT4_64)
    name = "layers.1.down_proj.weight"
    by_name = {n: program.weights[n] for n in program.weights if n.startswith(name)}
    assert {n: (type(e), e.shape) for n, e in by_name.items()} == {
        f"{name}.int4": (QuantizedValues, (64, 64)),
        f"{name}.scales": (QuantizedScales, (64, 1)),
        f"{name}.offsets": (QuantizedOffsets, (64, 1)),
    }


@pytest.mark.parametrize(("default", "closeness"), [(INT8, 0.02), (INT4, 0.2)])
def test_experts_are_quantized_too(default: WeightFormat, closeness: float) -> None:
    exact = routed()
    program = exact.copy()
    assert run(program, default) == 2
    counts = op_counts(program)
    assert counts["ew.quantized_grouped_linear"] == 1
    assert counts["ew.grouped_linear"] == 0
    assert counts["ew.linear"] == 2, "the router and the gate"
    inputs = whole_inputs(random_sequences((6, 3), 67))
    want, got = evaluate(exact, inputs), evaluate(program, inputs)
    assert (got - want).norm() / want.norm() < closeness


def test_other_formats_are_left_alone() -> None:
    program = decoder(Shape())
    assert run(program, F32) == 0
    assert op_counts(program)["ew.quantized_linear"] == 0
    mixed = decoder(Shape(heads=8, kv_heads=8))
    assert run(mixed, INT8, ("*.k_proj", PER_CHANNEL), ("*.v_proj", F32)) == 2 * 6 + 1
    counts = op_counts(mixed)
    assert counts["ew.linear"] == 2
    assert counts["ew.quantize_activation"] == 2 * 5 + 1, "q and k are in groups of another size"


def test_formats_must_have_been_chosen() -> None:
    with pytest.raises(PassError, match="quantize_linears requires 'formats have been chosen'"):
        QuantizeLinears().run(decoder(Shape()), PassContext())
