from __future__ import annotations

import pytest
import torch
from torch import nn

from enginewright.passes.cleanup.fold_constants import FoldConstants
from enginewright.passes.ir.weights import Source, Transpose
from enginewright.passes.normalize.normalize_linear import NormalizeLinear
from tests.passes.rewriting import op_counts, rewrite
from tests.passes.small_programs import program_from

aten, ew = torch.ops.aten, torch.ops.ew
Inputs = dict[str, torch.Tensor]


class Weights(nn.Module):
    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        torch.manual_seed(k)
        self.table = nn.Parameter(torch.randn(256, k))
        self.weight = nn.Parameter(torch.randn(n, k))
        self.turned = nn.Parameter(torch.randn(k, n))
        self.bias = nn.Parameter(torch.randn(n))
        self.wide_bias = nn.Parameter(torch.randn(1, n))


def _x(m: nn.Module, i: Inputs) -> torch.Tensor:
    return ew.embedding(i["ids"], m.table)


@pytest.fixture(params=[(4, 6), (8, 3)])
def weights(request: pytest.FixtureRequest) -> Weights:
    return Weights(*request.param)


SPELLINGS = {
    "linear": lambda m, x: aten.linear.default(x, m.weight),
    "linear with a bias": lambda m, x: aten.linear.default(x, m.weight, m.bias),
    "addmm": lambda m, x: torch.addmm(m.bias, x, m.turned),
    "mm": lambda m, x: torch.mm(x, m.turned),
    "matmul": lambda m, x: aten.matmul.default(x, m.turned),
    "mm of a transpose": lambda m, x: torch.mm(x, m.weight.t()),
    "mm plus a bias": lambda m, x: torch.mm(x, m.turned) + m.bias,
    "a bias plus linear": lambda m, x: m.bias + aten.linear.default(x, m.weight),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str, weights: Weights) -> None:
    program = program_from(lambda m, i: SPELLINGS[name](m, _x(m, i)), weights)
    rewrite(program, FoldConstants(), NormalizeLinear(), tolerance=1e-5)  # a product and its bias may be fused, or not
    assert op_counts(program) == {"ew.embedding": 1, "ew.linear": 1}
    (linear,) = program.nodes_of(ew.linear.default)
    expr = program.weight_of(linear.args[1])
    n, k = weights.weight.shape
    assert expr is not None
    assert expr.shape == (n, k)
    if name in ("addmm", "mm", "matmul"):
        assert isinstance(expr, Transpose)
        assert [p.source for p in expr.parts(0)] == ["turned"]
    if name == "mm of a transpose":
        assert isinstance(expr, Source)
    assert (linear.args[2] is not None) == ("bias" in name or name == "addmm")


def test_products_of_two_values_stay(weights: Weights) -> None:
    program = program_from(lambda m, i: _x(m, i) @ (_x(m, i).t() @ _x(m, i)), weights)
    (record,) = rewrite(program, NormalizeLinear())
    assert record.matched == 0
    assert op_counts(program)["ew.linear"] == 0


def test_reasons(weights: Weights) -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        x = _x(m, i)
        scaled = torch.addmm(m.bias, x, m.turned, beta=0.5)
        wide = torch.addmm(m.wide_bias, x, m.turned)
        computed = aten.linear.default(x, x[:2])
        return torch.cat([scaled, wide, computed], -1)

    program = program_from(call, weights)
    (record,) = rewrite(program, NormalizeLinear())
    n = weights.bias.shape[0]
    assert record.matched == 0
    assert [r.reason for r in record.rejected] == [
        f"product: the bias has the shape (1, {n}), not [{n}]",
        "linear: the weight is computed by the program",
    ]


def test_what_is_added_must_be_a_bias(weights: Weights) -> None:
    program = program_from(lambda m, i: aten.linear.default(_x(m, i), m.weight) + m.wide_bias, weights)
    rewrite(program, NormalizeLinear())
    assert op_counts(program) == {"ew.embedding": 1, "ew.linear": 1, "aten.add": 1}


@pytest.mark.parametrize("rank", [2, 3])
def test_a_product_with_the_weight_first_takes_columns(weights: Weights, rank: int) -> None:
    """weight @ x.T, as Mamba makes its time steps: the columns are the rows of a linear."""

    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        x = _x(m, i).transpose(0, 1)  # [K, T]
        product = aten.matmul.default(m.weight, x if rank == 2 else x[None])
        return (product if rank == 2 else product[0]).transpose(0, 1)

    program = program_from(call, weights)
    rewrite(program, NormalizeLinear(), tolerance=1e-5)
    assert len(program.nodes_of(ew.linear.default)) == 1 and not program.nodes_of(aten.matmul.default)


class _Heads(nn.Module):
    """``weight`` [H, .., N, K] has a matrix for each head."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(256, shape[0] * shape[-1]))
        self.weight = nn.Parameter(torch.randn(shape))


def _columns_of_heads(m: nn.Module, i: Inputs) -> torch.Tensor:
    """weight @ x, as Zamba makes B, C and time steps: x [H, .., K, T], and the result as [T, H N]."""
    x = _x(m, i).transpose(0, 1).unflatten(0, (m.weight.shape[0], *(1,) * (m.weight.dim() - 3), -1))
    return aten.matmul.default(m.weight, x).clone(memory_format=torch.contiguous_format).flatten(0, -2).transpose(0, 1)


@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 1, 5, 4)])
def test_a_product_of_each_head_is_a_linear_for_each(shape: tuple[int, ...]) -> None:
    program = program_from(_columns_of_heads, _Heads(*shape))
    rewrite(program, NormalizeLinear(), tolerance=1e-5)
    assert len(program.nodes_of(ew.linear.default)) == shape[0] and not program.nodes_of(aten.matmul.default)


def test_several_matrices_of_a_head_are_left() -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        x = _x(m, i).transpose(0, 1).view(2, 1, 4, -1)
        return (
            aten.matmul.default(m.weight, x).clone(memory_format=torch.contiguous_format).flatten(0, -2).transpose(0, 1)
        )

    program = program_from(call, _Heads(2, 3, 5, 4))
    rewrite(program, NormalizeLinear(), tolerance=1e-5)
    assert not program.nodes_of(ew.linear.default)
