from __future__ import annotations

import pytest
import torch
from torch import nn

from enginewright.passes.cleanup.fold_constants import FoldConstants, transposed
from enginewright.passes.ir.chosen_rows import Chosen
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import Part
from enginewright.passes.ir.stacked_weights import SwapAxes
from enginewright.passes.ir.weights import Apply, Cast, Concat, Slice, Source, Transpose
from tests.passes.rewriting import op_counts, rewrite
from tests.passes.small_programs import program_from

ew, aten = torch.ops.ew, torch.ops.aten
Inputs = dict[str, torch.Tensor]


class Weights(nn.Module):
    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        torch.manual_seed(k)
        self.table = nn.Parameter(torch.randn(256, k))
        self.scale = nn.Parameter(torch.randn(k))
        self.square = nn.Parameter(torch.randn(n, k))
        self.other = nn.Parameter(torch.randn(n, k))


@pytest.fixture(params=[(4, 6), (8, 8)])
def weights(request: pytest.FixtureRequest) -> Weights:
    return Weights(*request.param)


def _weight(program: Program, name: str) -> object:
    return program.weights[name]


def test_one_plus_weight(weights: Weights) -> None:
    program = program_from(lambda m, i: ew.rms_norm(ew.embedding(i["ids"], m.table), 1.0 + m.scale, 1e-6), weights)
    (record,) = rewrite(program, FoldConstants())
    assert record.matched == 1
    assert op_counts(program) == {"ew.embedding": 1, "ew.rms_norm": 1}
    expr = program.weights["scale_add"]
    assert isinstance(expr, Apply)
    assert expr.parts() == (Part("scale", 0, weights.scale.shape[0]),)
    torch.testing.assert_close(expr.evaluate(), 1 + weights.scale.detach(), rtol=0, atol=0)


def test_shapes_of_weights_stay_expressions_of_their_own(weights: Weights) -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        x = ew.embedding(i["ids"], m.table)
        both = torch.cat([m.square, m.other], 0)
        turned = aten.permute.default(m.square.t(), [1, 0])
        part = both[3:7]
        return torch.cat([ew.linear(x, w, None) for w in (both, turned, part, m.other.double().float())], -1)

    program = program_from(call, weights)
    rewrite(program, FoldConstants())
    assert op_counts(program) == {"ew.embedding": 1, "ew.linear": 4, "aten.cat": 1}
    linears = [program.weight_of(n.args[1]) for n in program.nodes_of(ew.linear.default)]
    both, turned, part, cast = linears
    assert isinstance(both, Concat)
    assert isinstance(turned, Source)
    assert isinstance(part, Slice)
    assert isinstance(cast, Cast)
    n = weights.square.shape[0]
    assert part.parts() == tuple(p for p in (Part("square", 3, min(7, n)), Part("other", 0, 7 - n)) if p.start < p.stop)


def test_a_transpose_of_a_transpose_is_the_weight() -> None:
    source = Source("w", (2, 3), torch.float32, lambda: torch.zeros(2, 3))
    assert transposed(transposed(source)) is source
    assert transposed(source) == Transpose(source)


class Experts(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(inputs)
        self.table = nn.Parameter(torch.randn(256, inputs))
        self.stack = nn.Parameter(torch.randn(3, inputs, 2 * outputs))


@pytest.mark.parametrize("size", [(4, 6), (8, 16)])
def test_rows_of_a_stack_that_alternate(size: tuple[int, int]) -> None:
    """A stack that is read as [E, K, N] and multiplied as [E, N, K], gates and ups apart, is rows of what is stored."""

    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        apart = torch.cat([m.stack[..., 0::2], m.stack[..., 1::2]], 2).transpose(1, 2)
        turned = aten.permute.default(m.stack, [2, 0, 1])  # three axes: no exchange of two
        x = ew.embedding(i["ids"], m.table)
        both = [ew.linear(x, apart[e], None) for e in range(3)]
        return torch.cat([*both, ew.linear(x, turned[:, 0], None)], -1)

    experts = Experts(*size)
    program = program_from(call, experts)
    stored = Source("stored", (3, 2 * size[1], size[0]), torch.float32, lambda: experts.stack.detach().transpose(1, 2))
    program.weights.change("stack", SwapAxes(stored, 1, 2))
    rewrite(program, FoldConstants())
    members = [program.weight_of(n.args[1]) for n in program.nodes_of(ew.linear.default)]
    assert all(isinstance(e, Apply) for e in members)  # one expert of the stack, which is the first argument
    member, *_ = {e.args[0] for e in members[:3] if isinstance(e, Apply)}
    assert isinstance(member, Concat)
    rows = range(2 * size[1])
    assert member == Concat((Chosen(stored, 1, tuple(rows[0::2])), Chosen(stored, 1, tuple(rows[1::2]))), 1)
    expected = torch.cat([experts.stack[..., 0::2], experts.stack[..., 1::2]], 2).transpose(1, 2)
    assert torch.equal(member.evaluate(), expected)


def test_what_reads_an_input_stays(weights: Weights) -> None:
    program = program_from(lambda m, i: ew.embedding(i["ids"], m.table) * m.scale, weights)
    (record,) = rewrite(program, FoldConstants())
    assert record.matched == 0
    assert op_counts(program)["aten.mul"] == 1


def test_what_would_grow_is_turned_down(weights: Weights) -> None:
    """An outer product of a vector with itself is larger than the vector."""

    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        return ew.linear(ew.embedding(i["ids"], m.table), m.scale[:, None] * m.scale[None, :], None)

    program = program_from(call, weights)
    (record,) = rewrite(program, FoldConstants())
    assert [r.reason for r in record.rejected] == ["its result is larger than the weights it is made from"]
    assert op_counts(program)["aten.mul"] == 1


@pytest.mark.parametrize("size", [8, 12])
def test_frequencies_made_of_a_range_are_a_weight(size: int) -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        inv_freq = 1.0 / (1e4 ** (torch.arange(0, size, 2, dtype=torch.float) / size))
        return ew.rope_table(i["positions"], inv_freq, 1.0)

    program = program_from(call)
    rewrite(program, FoldConstants())
    assert op_counts(program) == {"ew.rope_table": 1}
    weight = program.weight_of(program.nodes_of(ew.rope_table.default)[0].args[1])
    assert weight is not None
    assert weight.parts() == (Part("computed:arange", 0, size // 2),)
    torch.testing.assert_close(weight.evaluate(), 1e4 ** (-torch.arange(0, size, 2) / size), rtol=1e-6, atol=0)


def test_a_range_over_tokens_stays() -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        return torch.arange(i["ids"].shape[0])[:, None] + i["ids"][:, None]

    program = program_from(call)
    rewrite(program, FoldConstants())
    assert op_counts(program)["aten.arange"] == 1
