from __future__ import annotations

import pytest
import torch

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.ir.dequantized import Dequantized
from enginewright.passes.ir.weights import Source
from enginewright.passes.quantization.dequantize_tables import DequantizeTables
from tests.passes.quantization.test_choose_formats import F32, INT4_64, INT8
from tests.passes.quantization.test_quantize_embeddings import run
from tests.passes.rewriting import op_counts
from tests.passes.small_programs import Shape, decoder, evaluate, random_sequences, whole_inputs

ew = torch.ops.ew


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("storage", [INT8, INT4_64], ids=["int8", "int4 with offsets"])
def test_a_table_of_integers_becomes_the_floats_that_they_stand_for(storage: WeightFormat, tied: bool) -> None:
    before = decoder(Shape(hidden=64, heads=8, kv_heads=8, intermediate=64, tied=tied))
    run(before, storage)
    program = before.copy()
    assert DequantizeTables().run(program, PassContext()).matched == 1
    counts = op_counts(program)
    assert counts["ew.embedding"] == 1 and "ew.quantized_embedding" not in counts
    (node,) = program.nodes_of(ew.embedding.default)
    table = program.weight_of(node.args[1])
    assert isinstance(table, Dequantized) and table.shape == (67, 64) and table.dtype == torch.float32
    # A tied head keeps its integers; a table that nothing else reads is gone but for its floats.
    assert ("embed.int8" in program.weights or "embed.int4" in program.weights) == tied
    for lengths in ((4,), (7, 2)):
        inputs = whole_inputs(random_sequences(lengths, 67))
        assert torch.equal(evaluate(program, inputs), evaluate(before, inputs))  # the very same products


def test_tables_of_floats_are_left_alone() -> None:
    program = decoder(Shape())
    run(program, F32)
    assert DequantizeTables().run(program, PassContext()).matched == 0


def _source(value: torch.Tensor) -> Source:
    return Source("a", tuple(value.shape), value.dtype, lambda: value)


@pytest.mark.parametrize("group", [0, 32])
def test_values_by_hand(group: int) -> None:
    values = torch.arange(2 * 64, dtype=torch.int8).reshape(2, 64)
    scales = torch.full((2, 64 // (group or 64)), 0.5, dtype=torch.half)
    offsets = torch.full_like(scales, -3)
    floats = Dequantized(_source(values), _source(scales), _source(offsets), group)
    assert torch.equal(floats.evaluate(), values.float() * 0.5 - 3)
