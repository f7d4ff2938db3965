from __future__ import annotations

import pytest
import torch

from enginewright.passes.framework.base import PassContext
from enginewright.passes.fusion.fuse_linear_activation import FuseLinearActivation
from enginewright.passes.fusion.fuse_linear_residual import FuseLinearResidual
from enginewright.passes.ir.program import Program
from tests.passes.fusion.fused import fuse, prepared
from tests.passes.small_programs import Linear, program_from, random_sequences, whole_inputs

aten, ew = torch.ops.aten, torch.ops.ew


@pytest.mark.parametrize(
    ("family", "storage", "size", "kind"),
    [
        ("GPT2", "int8", 64, "gelu_tanh"),
        ("GPT2", "bf16", 64, "gelu_tanh"),
        ("GPTNeoX", "f32", 96, "gelu"),
    ],
)
def test_the_activation_of_an_mlp(family: str, storage: str, size: int, kind: str) -> None:
    before = prepared(family, storage, size)
    after, record = fuse(before, FuseLinearActivation())
    assert record.matched == 2 and not record.rejected
    assert not after.nodes_of(aten.gelu.default) and len(before.nodes_of(aten.gelu.default)) == 2
    fused = [n for n in after.nodes_of(ew.linear.default, ew.quantized_linear.default) if n.kwargs]
    assert [n.kwargs for n in fused] == [{"activation": kind}] * 2
    assert len({n.meta["where"] for n in fused}) == 2


def _program(activation: str, width: int) -> Program:
    inner = torch.nn.Module()
    torch.manual_seed(1)
    inner.up, inner.other = Linear(width, 8, bias=True), Linear(width, 8)

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = i["ids"].float()[:, None] * torch.tensor([0.1 * j - 0.3 for j in range(8)])
        y = m.up(x)
        return ew.take_rows(
            {
                "relu": lambda: torch.relu(y),
                "silu": lambda: torch.nn.functional.silu(y),
                "sigmoid": lambda: torch.sigmoid(y),
                "tanh": lambda: torch.tanh(y),
                "relu2": lambda: torch.relu(y) ** 2,
                "read elsewhere": lambda: torch.relu(y) + y,
                "of two": lambda: torch.relu(y) * torch.relu(m.other(x)),
                "behind a sum": lambda: torch.relu(y + 1),
                "of an activation": lambda: torch.tanh(torch.relu(y)),
                "cubed": lambda: torch.relu(y) ** 3,
            }[activation](),
            i["rows"],
        )

    return program_from(call, inner)


@pytest.mark.parametrize("width", [5, 40])
@pytest.mark.parametrize("kind", ["relu", "silu", "sigmoid", "tanh", "relu2"])
def test_every_kind(kind: str, width: int) -> None:
    after, _ = fuse(_program(kind, width), FuseLinearActivation())
    (linear,) = after.nodes_of(ew.linear.default)
    assert linear.kwargs == {"activation": kind}
    assert not after.nodes_of(aten.relu.default, aten.pow.Tensor_Scalar, aten.silu.default, aten.tanh.default)


@pytest.mark.parametrize(
    ("kind", "matched", "kinds", "reasons"),
    [
        ("read elsewhere", 0, [{}], ["activation: the linear's result is used elsewhere"]),
        ("of two", 2, [{"activation": "relu"}] * 2, ["squared_relu: it is a product of two linears' results"]),
        ("behind a sum", 0, [{}], []),
        ("of an activation", 1, [{"activation": "relu"}], []),
        ("cubed", 1, [{"activation": "relu"}], []),
    ],
)
def test_what_stays(kind: str, matched: int, kinds: list[dict[str, str]], reasons: list[str]) -> None:
    after, record = fuse(_program(kind, 6), FuseLinearActivation())
    assert record.matched == matched
    assert [n.kwargs for n in after.nodes_of(ew.linear.default)] == kinds
    assert [r.reason for r in record.rejected] == reasons


def test_linears_of_experts() -> None:
    """They take an activation and no residual."""
    inner = torch.nn.Module()
    torch.manual_seed(1)
    inner.weight = torch.nn.Parameter(torch.randn(2, 8, 8))

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = i["ids"].float()[:, None] * torch.tensor([0.1 * j - 0.3 for j in range(8)])
        _, rows, starts = ew.route_experts(i["ids"][:, None] % 2, 2)
        x = ew.take_rows(x, rows)
        return ew.take_rows(torch.nn.functional.silu(ew.grouped_linear(x, starts, m.weight, None)) + x, i["rows"])

    before = program_from(call, inner)
    after = before.copy()
    assert FuseLinearActivation().run(after, PassContext()).matched == 1
    residual = FuseLinearResidual().run(after, PassContext())
    assert not residual.matched and not residual.rejected
    (linear,) = after.nodes_of(ew.grouped_linear.default)
    assert linear.kwargs == {"activation": "silu"} and not after.nodes_of(aten.silu.default)
    inputs = whole_inputs(random_sequences((3, 4), 50))
    assert torch.equal(after.evaluate(inputs)[0], before.evaluate(inputs)[0])
