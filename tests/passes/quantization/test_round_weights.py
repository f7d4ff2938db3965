from __future__ import annotations

import math

import pytest
import torch

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.fast_evaluation import FastEvaluation
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import FormatOverride, WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Source
from enginewright.passes.quantization.choose_formats import FORMAT, ChooseFormats
from enginewright.passes.quantization.round_weights import RoundWeights
from enginewright.runtime.shared.errors import PassError, SourceError
from tests.passes.quantization.test_choose_formats import BF16, F32, INT8, routed
from tests.passes.rewriting import op_counts
from tests.passes.small_programs import Shape, decoder, evaluate, random_sequences, whole_inputs

ew = torch.ops.ew

NF4 = WeightFormat(storage="nf4", group_size=64)
FP8, GROUPS = WeightFormat(storage="fp8"), WeightFormat(storage="fp8", group_size=32)


def run(program: Program, formats: WeightFormats) -> int:
    context = PassContext(recipe=PassOptions(weights=formats))
    ChooseFormats().run(program, context)
    return RoundWeights().run(program, context).matched


@pytest.mark.parametrize("wanted", [FP8, GROUPS])
@pytest.mark.parametrize(("hidden", "tied"), [(32, True), (48, False)])
def test_a_decoder_is_close_to_its_float_form(hidden: int, tied: bool, wanted: WeightFormat) -> None:
    exact = decoder(Shape(hidden=hidden, heads=8, kv_heads=8, tied=tied))
    program = exact.copy()
    assert run(program, WeightFormats(default=wanted)) == 2 * 7 + 2
    counts = op_counts(program)
    assert counts["ew.dequantize"] == 2 * 7 + (1 if tied else 2), "a tied table is dequantized once"
    assert counts["ew.linear"] == op_counts(exact)["ew.linear"]
    assert {n.meta[FORMAT] for n in program.nodes_of(ew.linear.default, ew.embedding.default)} == {wanted}
    tables = {name for name in program.weights if name.startswith(("embed", "head"))}
    kinds = {"embed.fp8", "embed.scales"} | (set() if tied else {"head.fp8", "head.scales"})
    assert tables == kinds
    assert program.weights["embed.fp8"].parts(0) == exact.weights["embed"].parts(0)
    inputs = whole_inputs(random_sequences((7, 2), 67))
    want, got = evaluate(exact, inputs), evaluate(program, inputs)
    # A value is off by 1/16 of itself at most, by a third of that on average; some 15 products in a row.
    assert 0 < (got - want).norm() / want.norm() < 0.15
    # The same product of the same floats, whoever decodes them.
    torch.testing.assert_close(FastEvaluation(program).evaluate(inputs)[0], got, rtol=1e-5, atol=1e-5)


def test_experts_too_but_no_router() -> None:
    exact = routed()
    program = exact.copy()
    assert run(program, WeightFormats(default=FP8)) == 2
    assert {n for n in program.weights if n.endswith(".fp8")} == {"experts.fp8", "out.weight.fp8"}
    inputs = whole_inputs(random_sequences((6, 3), 67))
    want, got = evaluate(exact, inputs), evaluate(program, inputs)
    assert 0 < (got - want).norm() / want.norm() < 0.15


def test_a_table_with_a_format_of_its_own_and_a_head_that_stays() -> None:
    program = decoder(Shape(tied=True))
    formats = WeightFormats(
        default=F32, overrides=(FormatOverride(layers="layers.0.down_proj", format=FP8),), embeddings=GROUPS
    )
    assert run(program, formats) == 3
    assert {n for n in program.weights if n.endswith(".fp8")} == {"embed.fp8", "layers.0.down_proj.weight.fp8"}
    groups = {str(n.args[0]): n.args[2] for n in program.nodes_of(ew.dequantize.default)}
    assert sorted(groups.values()) == [0, 32]


@pytest.mark.parametrize("tied", [True, False])
def test_a_format_that_no_kernel_reads_becomes_weights_of_floats(tied: bool) -> None:
    exact = decoder(Shape(hidden=48, heads=8, kv_heads=8, tied=tied))
    program = exact.copy()
    assert run(program, WeightFormats(default=NF4)) == 2 * 7 + 2
    assert op_counts(program) == op_counts(exact)
    assert {n for n in program.weights if n.startswith(("embed", "head"))} == {"embed.nf4"} | (
        set() if tied else {"head.nf4"}
    )
    assert program.weights["embed.nf4"].dtype == torch.float32
    inputs = whole_inputs(random_sequences((7, 2), 67))
    want, got = evaluate(exact, inputs), evaluate(program, inputs)
    assert 0 < (got - want).norm() / want.norm() < 0.4  # a weight is off by a tenth of the largest of its group


@pytest.mark.parametrize("default", [F32, BF16, INT8])
def test_other_formats_are_left_alone(default: WeightFormat) -> None:
    program = decoder(Shape(intermediate=64))
    assert run(program, WeightFormats(default=default)) == 0
    assert "ew.dequantize" not in op_counts(program)


def test_norms_and_positions_stay_floats_and_so_do_few_outputs() -> None:
    program = decoder(Shape(heads=8, kv_heads=8))
    assert run(program, WeightFormats(default=FP8)) == 16
    left = {n for n in program.weights if not n.endswith((".fp8", ".scales"))}
    assert left == {n for n in left if "norm" in n or n == "inv_freq"}, left
    assert run(decoder(Shape(kv_heads=2, head_size=8)), WeightFormats(default=FP8)) == 12, (
        "keys and values of 16 outputs"
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_an_error_when_they_are_written(bad: float) -> None:
    program = decoder(Shape())
    name = "layers.1.up_proj.weight"
    weight = program.weights[name].evaluate().clone()  # other tests have the same decoder
    weight[3, 5] = bad
    program.weights.change(name, Source(name, tuple(weight.shape), weight.dtype, lambda: weight))
    run(program, WeightFormats(default=FP8))
    with pytest.raises(SourceError, match=r"weight layers\.1\.up_proj\.weight: it has NaN or infinite values"):
        program.weights["layers.1.up_proj.weight.fp8"].evaluate()


def test_formats_must_have_been_chosen() -> None:
    with pytest.raises(PassError, match="requires 'formats have been chosen'"):
        RoundWeights().run(decoder(Shape()), PassContext())
