from __future__ import annotations

import pytest
import torch
from torch import nn

from enginewright.passes.cleanup.fold_constants import FoldConstants, transposed
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import Part
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
    found = program.weight_of(program.nodes_of(ew.rope_table.default)[0].args[1])
    assert found is not None
    assert found.parts() == (Part("computed:arange", 0, size // 2),)
    torch.testing.assert_close(found.evaluate(), 1e4 ** (-torch.arange(0, size, 2) / size), rtol=1e-6, atol=0)


def test_a_range_over_tokens_stays() -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        return torch.arange(i["ids"].shape[0])[:, None] + i["ids"][:, None]

    program = program_from(call)
    rewrite(program, FoldConstants())
    assert op_counts(program)["aten.arange"] == 1
