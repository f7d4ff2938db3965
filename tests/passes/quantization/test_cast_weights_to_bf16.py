from __future__ import annotations

import pytest
import torch

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.passes.quantization.cast_weights_to_bf16 import CastWeightsToBf16
from enginewright.passes.quantization.choose_formats import ChooseFormats
from enginewright.runtime.shared.errors import PassError
from tests.passes.quantization.test_choose_formats import BF16, F32, INT8, routed
from tests.passes.rewriting import op_counts
from tests.passes.small_programs import Shape, decoder, evaluate, random_sequences, whole_inputs


def run(program: Program, default: WeightFormat) -> int:
    context = PassContext(recipe=PassOptions(weights=WeightFormats(default=default)))
    ChooseFormats().run(program, context)
    return CastWeightsToBf16().run(program, context).matched


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_is_close_to_its_float_form(tied: bool) -> None:
    exact = decoder(Shape(heads=8, kv_heads=8, tied=tied))
    program = exact.copy()
    assert run(program, BF16) == 2 * 7 + 2
    counts = op_counts(program)
    assert counts["aten._to_copy"] - op_counts(exact)["aten._to_copy"] == 2 * 4 + 1, "inputs are cast once"
    tables = {n: program.weights[n].dtype for n in program.weights if n.startswith(("embed", "head"))}
    assert tables == dict.fromkeys(["embed.bf16"] + ([] if tied else ["head.bf16"]), torch.bfloat16)
    for lengths in ((4,), (7, 2)):
        inputs = whole_inputs(random_sequences(lengths, 67))
        want, got = evaluate(exact, inputs), evaluate(program, inputs)
        assert got.dtype is torch.float32
        # Rounding to 8 bits of mantissa on both sides, some 15 products in a row.
        assert 0 < (got - want).norm() / want.norm() < 0.02


def test_experts_too_but_no_router() -> None:
    exact = routed()
    program = exact.copy()
    assert run(program, BF16) == 2
    assert {n for n in program.weights if n.endswith(".bf16")} == {"experts.bf16", "out.weight.bf16"}
    inputs = whole_inputs(random_sequences((6, 3), 67))
    want, got = evaluate(exact, inputs), evaluate(program, inputs)
    assert (got - want).norm() / want.norm() < 0.02


@pytest.mark.parametrize("default", [F32, INT8])
def test_other_formats_are_left_alone(default: WeightFormat) -> None:
    program = decoder(Shape())
    assert run(program, default) == 0
    assert not [n for n in program.weights if n.endswith(".bf16")]


def test_formats_must_have_been_chosen() -> None:
    with pytest.raises(PassError, match="requires 'formats have been chosen'"):
        CastWeightsToBf16().run(decoder(Shape()), PassContext())
