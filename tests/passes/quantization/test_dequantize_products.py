from __future__ import annotations

import pytest

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.quantization.dequantize_products import DequantizeProducts
from tests.passes.quantization.test_choose_formats import F32, INT4_64, INT8
from tests.passes.quantization.test_quantize_embeddings import run
from tests.passes.rewriting import op_counts
from tests.passes.small_programs import Shape, decoder, evaluate, random_sequences, whole_inputs


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("storage", [INT8, INT4_64], ids=["int8", "int4 with offsets"])
def test_products_take_the_activations_themselves(storage: WeightFormat, layers: int) -> None:
    shape = Shape(windows=(0,) * layers, hidden=64, heads=8, kv_heads=8, intermediate=64)
    before = decoder(shape)
    run(before, storage)
    program = before.copy()
    matched = DequantizeProducts().run(program, PassContext()).matched
    counts, was = op_counts(program), op_counts(before)
    quantized = sum(n for op, n in was.items() if op in ("ew.quantized_linear", "ew.quantized_embedding"))
    assert matched == quantized > layers
    assert not [op for op in counts if op.startswith("ew.quantize")]
    assert counts["ew.dequantize"] == len({op.args[0] for op in program.graph.nodes if "dequantize" in str(op.target)})
    for name in before.weights:  # as they are stored
        assert name not in program.weights or program.weights[name] is before.weights[name]
    for lengths in ((4,), (7, 2)):
        inputs = whole_inputs(random_sequences(lengths, 67))
        exact, rounded = evaluate(program, inputs), evaluate(before, inputs)
        assert 0 < (exact - rounded).norm() / rounded.norm() < 0.03  # of activations' 8 bits


def test_floats_are_left_alone() -> None:
    program = decoder(Shape())
    run(program, F32)
    before = op_counts(program)
    assert DequantizeProducts().run(program, PassContext()).matched == 0
    assert op_counts(program) == before
