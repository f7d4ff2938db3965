from __future__ import annotations

import pytest

from enginewright.passes.base import PassContext
from enginewright.passes.ir.program import Program
from enginewright.passes.quantization.choose_formats import ChooseFormats
from enginewright.passes.quantization.quantize_embeddings import QuantizeEmbeddings
from enginewright.passes.quantization.quantize_linears import QuantizeLinears
from enginewright.passes.weight_formats import WeightFormats
from enginewright.plugins.contracts import WeightFormat
from enginewright.plugins.errors import PassError
from tests.passes.quantization.test_choose_formats import BF16, F32, INT8
from tests.passes.rewriting import op_counts
from tests.passes.small_programs import Shape, decoder, evaluate, random_sequences, whole_inputs


def run(program: Program, default: WeightFormat) -> int:
    context = PassContext(formats=WeightFormats(default))
    ChooseFormats().run(program, context)
    QuantizeLinears().run(program, context)
    return QuantizeEmbeddings().run(program, context).matched


@pytest.mark.parametrize("hidden", [32, 48])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_table_is_kept_once(hidden: int, tied: bool) -> None:
    exact = decoder(Shape(hidden=hidden, heads=8, kv_heads=8, tied=tied))
    program = exact.copy()
    assert run(program, INT8) == 1
    assert op_counts(program)["ew.quantized_embedding"] == 1
    tables = {name for name in program.weights if name.startswith(("embed", "head"))}
    assert tables == {"embed.int8", "embed.scales"} | (set() if tied else {"head.int8", "head.scales"})
    for lengths in ((4,), (7, 2)):
        inputs = whole_inputs(random_sequences(lengths, 67))
        want, got = evaluate(exact, inputs), evaluate(program, inputs)
        assert (got - want).norm() / want.norm() < 0.05


@pytest.mark.parametrize("default", [F32, BF16])
def test_other_tables_are_left_alone(default: WeightFormat) -> None:
    program = decoder(Shape())
    assert run(program, default) == 0
    assert op_counts(program)["ew.embedding"] == 1


def test_formats_must_have_been_chosen() -> None:
    with pytest.raises(PassError, match="requires 'formats have been chosen'"):
        QuantizeEmbeddings().run(decoder(Shape()), PassContext())
