from __future__ import annotations

import pytest
import torch

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.passes.quantization.choose_formats import ChooseFormats
from enginewright.passes.quantization.quantize_embeddings import QuantizeEmbeddings
from enginewright.passes.quantization.quantize_linears import QuantizeLinears
from enginewright.runtime.shared.errors import PassError
from tests.passes.quantization.test_choose_formats import BF16, F32, INT4_64, INT8
from tests.passes.rewriting import op_counts
from tests.passes.small_programs import Shape, decoder, evaluate, random_sequences, whole_inputs

ew = torch.ops.ew


def run(program: Program, default: WeightFormat) -> int:
    context = PassContext(recipe=PassOptions(weights=WeightFormats(default=default)))
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


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_of_4_bits_with_offsets(tied: bool) -> None:
    exact = decoder(Shape(hidden=64, heads=8, kv_heads=8, intermediate=64, tied=tied))
    program = exact.copy()
    assert run(program, INT4_64) == 1
    (table,) = program.nodes_of(ew.quantized_embedding.default)
    assert table.args[4:] == (4, 64)
    tables = {name for name in program.weights if name.startswith(("embed", "head"))}
    kinds = ("int4", "scales", "offsets")
    assert tables == {f"{t}.{kind}" for t in (("embed",) if tied else ("embed", "head")) for kind in kinds}
    inputs = whole_inputs(random_sequences((7, 2), 67))
    want, got = evaluate(exact, inputs), evaluate(program, inputs)
    assert 0 < (got - want).norm() / want.norm() < 0.3


@pytest.mark.parametrize("default", [F32, BF16])
def test_other_tables_are_left_alone(default: WeightFormat) -> None:
    program = decoder(Shape())
    assert run(program, default) == 0
    assert op_counts(program)["ew.embedding"] == 1


def test_formats_must_have_been_chosen() -> None:
    with pytest.raises(PassError, match="requires 'formats have been chosen'"):
        QuantizeEmbeddings().run(decoder(Shape()), PassContext())
