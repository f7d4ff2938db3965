from __future__ import annotations

import pytest
import torch

from enginewright.passes.framework.base import PassContext
from enginewright.passes.fusion.fuse_gated_quantize import FuseGatedQuantize
from enginewright.passes.ir.program import Program
from tests.passes.captured import op_counts
from tests.passes.fusion.fused import fuse, prepared
from tests.passes.small_programs import program_from, random_sequences, whole_inputs

ew = torch.ops.ew


def test_the_middle_of_an_mlp() -> None:
    before = prepared("Llama", "int8")
    after, record = fuse(before, FuseGatedQuantize())
    assert record.matched == 2 and not record.rejected
    assert op_counts(after)["ew.gated_activation_quantize"] == 2 and not op_counts(after)["ew.gated_activation"]
    assert [n.meta["where"][0].split(".")[2:4] for n in after.nodes_of(ew.gated_activation_quantize.default)] == [
        [str(i), "mlp"] for i in range(2)
    ]


def _program(kind: str, size: int) -> Program:
    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = i["ids"].float()[:, None] * torch.tensor([0.1 * j - 0.3 for j in range(2 * size)])
        y = ew.gated_activation(x, "gelu" if kind == "read elsewhere" else kind)
        values, scales, sums = ew.quantize_activation(y, 8)
        out = scales + sums + values.float().sum(-1, keepdim=True)
        return ew.take_rows(out + y if kind == "read elsewhere" else out, i["rows"])

    return program_from(call)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 8])
def test_by_itself(kind: str, size: int) -> None:
    before = _program(kind, size)
    after = before.copy()
    assert FuseGatedQuantize().run(after, PassContext()).matched == 1
    inputs = whole_inputs(random_sequences((3, 4), 50))
    assert torch.equal(after.evaluate(inputs)[0], before.evaluate(inputs)[0])
    (fused,) = after.nodes_of(ew.gated_activation_quantize.default)
    assert fused.args[1:] == (kind, 8)


def test_what_stays() -> None:
    program = _program("read elsewhere", 1)
    record = FuseGatedQuantize().run(program, PassContext())
    assert not record.matched
    assert [r.reason for r in record.rejected] == [
        "gated_quantize: the activation's result is read by something else as well"
    ]
