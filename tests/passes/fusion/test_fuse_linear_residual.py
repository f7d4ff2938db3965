from __future__ import annotations

import pytest
import torch

from enginewright.passes.fusion.fuse_linear_activation import FuseLinearActivation
from enginewright.passes.fusion.fuse_linear_residual import FuseLinearResidual
from enginewright.passes.ir.program import Program
from tests.passes.fusion.fused import fuse, prepared
from tests.passes.small_programs import Linear, program_from

aten, ew = torch.ops.aten, torch.ops.ew
LINEARS = (ew.linear.default, ew.quantized_linear.default)


@pytest.mark.parametrize(
    ("family", "storage", "size"), [("Llama", "f32", 64), ("Llama", "int8", 64), ("GPT2", "bf16", 64)]
)
def test_attention_and_mlp(family: str, storage: str, size: int) -> None:
    before = prepared(family, storage, size)
    after, record = fuse(before, FuseLinearResidual())
    assert record.matched == 4 and not record.rejected
    residual = [n for n in after.nodes_of(*LINEARS) if "residual" in n.kwargs]
    assert len(residual) == 4
    # The sum is the linear's, and the norm behind it adds nothing.
    assert not after.nodes_of(ew.add_rms_norm.default)
    norms = after.nodes_of(ew.rms_norm.default, ew.layer_norm.default)
    assert {n.args[0] for n in norms if n.args[0] in residual} <= set(residual)
    assert all("mlp" in "".join(n.meta["where"]) or "attn" in "".join(n.meta["where"]) for n in residual)


def _program(kind: str, width: int) -> Program:
    inner = torch.nn.Module()
    torch.manual_seed(1)
    inner.a, inner.b = Linear(width, 8, bias=True), Linear(width, 8)

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = i["ids"].float()[:, None] * torch.tensor([0.1 * j - 0.3 for j in range(8)])
        y = m.a(x)
        z = i["positions"].float()[:, None] * torch.tensor([0.2 * j - 0.5 for j in range(width)])
        return ew.take_rows(
            {
                "after an activation": lambda: z + torch.tanh(y),
                "two linears": lambda: y + m.b(x),
                "three": lambda: (y + m.b(x)) + z,
                "read elsewhere": lambda: y * (y + z),
                "broadcast": lambda: y + torch.tensor([[1.0 + j for j in range(width)]]),
                "twice": lambda: y + y,
                "alpha": lambda: torch.add(y, z, alpha=2),
                "norm": lambda: torch.mul(*ew.add_rms_norm(y, z, None, 1e-5)),
                "norm, linear behind": lambda: torch.mul(*ew.add_layer_norm(z, y, None, None, 1e-5)),
                "norm alone": lambda: ew.add_rms_norm(y, z, None, 1e-5)[0],
                "sum alone": lambda: ew.add_rms_norm(y, z, None, 1e-5)[1],
                "norm, read elsewhere": lambda: torch.mul(*ew.add_rms_norm(y, z, None, 1e-5)) * y,
                "norm, twice": lambda: torch.mul(*ew.add_rms_norm(y, y, None, 1e-5)),
            }[kind](),
            i["rows"],
        )

    return program_from(call, inner)


@pytest.mark.parametrize("width", [8, 40])
@pytest.mark.parametrize(("kind", "activation"), [("after an activation", "tanh"), ("two linears", ""), ("three", "")])
def test_sums(kind: str, activation: str, width: int) -> None:
    after, record = fuse(_program(kind, width), FuseLinearActivation(), FuseLinearResidual())
    assert record.matched == 1
    (linear,) = (n for n in after.nodes_of(ew.linear.default) if "residual" in n.kwargs)
    assert linear.kwargs.get("activation", "") == activation
    assert len(after.nodes_of(aten.add.Tensor)) == (kind == "three")
    # (a + b) + c: the linear that adds b can't add c too, or the sum would be taken in another order.
    reasons = ["linear_add: the linear adds a residual already"] if kind == "three" else []
    assert [r.reason for r in record.rejected] == reasons


@pytest.mark.parametrize("kind", ["norm", "norm, linear behind", "norm alone", "sum alone"])
def test_sums_with_a_norm(kind: str) -> None:
    after, record = fuse(_program(kind, 40), FuseLinearResidual())
    assert record.matched == 1 and not record.rejected
    (linear,) = after.nodes_of(ew.linear.default)
    assert set(linear.kwargs) == {"residual"}
    assert not after.nodes_of(ew.add_rms_norm.default, ew.add_layer_norm.default)


@pytest.mark.parametrize(
    ("kind", "reasons"),
    [
        ("read elsewhere", ["linear_add: the linear's result is used elsewhere"]),
        ("broadcast", ["linear_add: one side of the sum is broadcast"]),
        ("twice", ["linear_add: the linear is added to itself"]),
        ("alpha", []),
        ("norm, read elsewhere", ["linear_add_norm: the linear's result is used elsewhere"]),
        ("norm, twice", ["linear_add_norm: the linear is added to itself"]),
    ],
)
def test_what_stays(kind: str, reasons: list[str]) -> None:
    after, record = fuse(_program(kind, 8), FuseLinearResidual())
    assert not record.matched and not [n for n in after.nodes_of(ew.linear.default) if n.kwargs]
    assert [r.reason for r in record.rejected] == reasons
