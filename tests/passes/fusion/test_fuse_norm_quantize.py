from __future__ import annotations

import operator

import pytest
import torch

from enginewright.passes.framework.base import PassContext
from enginewright.passes.fusion.fuse_linear_residual import FuseLinearResidual
from enginewright.passes.fusion.fuse_norm_quantize import FuseNormQuantize
from enginewright.passes.ir.program import Program
from tests.passes.captured import op_counts
from tests.passes.fusion.fused import fuse, prepared
from tests.passes.small_programs import Norm, program_from, random_sequences, whole_inputs

ew = torch.ops.ew


@pytest.mark.parametrize(
    ("family", "size", "counts"),
    [
        ("Llama", 64, {"ew.rms_norm_quantize": 1, "ew.add_rms_norm_quantize": 4}),
        ("GPT2", 64, {"ew.add_layer_norm_quantize": 5}),
    ],
)
def test_the_norms_of_layers(family: str, size: int, counts: dict[str, int]) -> None:
    before = prepared(family, "int8", size)
    after, record = fuse(before, FuseNormQuantize())
    assert record.matched == 5 and not record.rejected
    fused = {name: n for name, n in op_counts(after).items() if name.endswith("norm_quantize")}
    assert fused == counts
    assert not [n for n in op_counts(after) if n.endswith("_norm")]
    adding = after.nodes_of(ew.add_rms_norm_quantize.default, ew.add_layer_norm_quantize.default)
    read = {user.args[1] for n in adding for user in n.users}
    assert read == {0, 1, 2, 3} and all(u.target is operator.getitem for n in adding for u in n.users)
    assert len({n.meta["where"] for n in adding}) == len(adding)


def test_behind_a_linear_with_a_residual() -> None:
    after, record = fuse(prepared("Llama", "int8"), FuseLinearResidual(), FuseNormQuantize())
    assert record.matched == 5
    assert op_counts(after)["ew.rms_norm_quantize"] == 5 and not op_counts(after)["ew.add_rms_norm_quantize"]


def _program(kind: str, size: int) -> Program:
    inner = torch.nn.Module()
    torch.manual_seed(1)
    inner.norm = Norm(size, layer_norm=kind != "rms")

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = i["ids"].float()[:, None] * torch.tensor([0.1 * j - 0.3 for j in range(size)])
        y = m.norm(x)
        y = torch.tanh(y) if kind == "not the norm" else y
        values, scales, sums = ew.quantize_activation(y, 8)
        out = scales + sums + values.float().sum(-1, keepdim=True)
        if kind == "read elsewhere":
            out = out + y.sum(-1, keepdim=True)
        if kind == "two groups":
            out = out + ew.quantize_activation(y, 0)[1]
        return ew.take_rows(out, i["rows"])

    return program_from(call, inner)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("size", [8, 43])
def test_by_itself(kind: str, size: int) -> None:
    before = _program(kind, size)
    after = before.copy()
    assert FuseNormQuantize().run(after, PassContext()).matched == 1
    inputs = whole_inputs(random_sequences((3, 4), 50))
    assert torch.equal(after.evaluate(inputs)[0], before.evaluate(inputs)[0])
    assert op_counts(after)[f"ew.{kind}_norm_quantize"] == 1


@pytest.mark.parametrize(
    ("kind", "reasons"),
    [
        ("read elsewhere", ["norm_quantize: the norm's result is read by something else as well"]),
        ("two groups", ["norm_quantize: the norm's result is read by something else as well"] * 2),
        ("not the norm", []),
    ],
)
def test_what_stays(kind: str, reasons: list[str]) -> None:
    program = _program(kind, 16)
    record = FuseNormQuantize().run(program, PassContext())
    assert not record.matched and [r.reason for r in record.rejected] == reasons
    assert program.nodes_of(ew.quantize_activation.default)
