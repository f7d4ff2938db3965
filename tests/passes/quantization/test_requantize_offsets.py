from __future__ import annotations

from typing import Literal

import pytest
import torch

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.pass_options import OffsetOptions, PassOptions
from enginewright.passes.quantization.requantize_offsets import RequantizeOffsets
from enginewright.runtime.shared.errors import PassError
from tests.passes.quantization.test_choose_formats import INT4_64, INT8
from tests.passes.quantization.test_quantize_embeddings import run
from tests.passes.small_programs import Shape, decoder, evaluate, random_sequences, whole_inputs

ew = torch.ops.ew


@pytest.mark.parametrize("intermediate", [64, 128])
def test_integers_with_offsets_become_integers_without(intermediate: int) -> None:
    before = decoder(Shape(hidden=64, heads=8, kv_heads=8, intermediate=intermediate))
    run(before, INT4_64)
    program = before.copy()
    expected = RequantizeOffsets()
    context = PassContext(recipe=PassOptions(engines=OffsetOptions(offsets="requantize")))
    assert not expected.wanted(PassContext()) and expected.wanted(context)
    linears = program.nodes_of(ew.quantized_linear.default)
    assert linears and expected.run(program, context).matched == len(linears)
    for node in program.nodes_of(ew.quantized_linear.default):
        a = bound_arguments(node)
        values, scales = program.weight_of(a["weight"]), program.weight_of(a["weight_scales"])
        assert a["weight_offsets"] is None and values is not None and scales is not None
        integers = values.evaluate()
        assert int(integers.min()) >= -8 and int(integers.max()) <= 7
    for lengths in ((4,), (7, 2)):
        inputs = whole_inputs(random_sequences(lengths, 67))
        want, got = evaluate(before, inputs), evaluate(program, inputs)
        assert 0 < (got - want).norm() / want.norm() < 0.3  # 4 bits of random weights, once more


def test_they_may_be_refused() -> None:
    program = decoder(Shape(hidden=64, heads=8, kv_heads=8, intermediate=64))
    run(program, INT4_64)
    with pytest.raises(PassError, match=r"int4 with offsets, which engines.offsets of the recipe refuses\n.*zero"):
        RequantizeOffsets().run(program, PassContext(recipe=PassOptions(engines=OffsetOptions(offsets="refuse"))))


@pytest.mark.parametrize("offsets", ["requantize", "refuse"])
@pytest.mark.parametrize(
    "storage", [INT8, WeightFormat(storage="int4", group_size=32, activation="int8", activation_group_size=32)]
)
def test_what_has_none_is_left_alone(storage: WeightFormat, offsets: Literal["requantize", "refuse"]) -> None:
    program = decoder(Shape(hidden=64, heads=8, kv_heads=8, intermediate=64))
    run(program, storage)
    assert (
        RequantizeOffsets()
        .run(program, PassContext(recipe=PassOptions(engines=OffsetOptions(offsets=offsets))))
        .matched
        == 0
    )
