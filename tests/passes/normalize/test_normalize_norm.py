from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from enginewright.passes.cleanup.fold_constants import FoldConstants
from enginewright.passes.cleanup.merge_common_subexpressions import MergeCommonSubexpressions
from enginewright.passes.cleanup.remove_noops import RemoveNoops
from enginewright.passes.normalize.normalize_norm import NormalizeNorm
from tests.passes.rewriting import op_counts, rewrite
from tests.passes.small_programs import program_from

aten, ew = torch.ops.aten, torch.ops.ew
Inputs = dict[str, torch.Tensor]

# The references take the same means of the same float32 numbers, but may multiply in another order: values are of
# size 1, and one rounding is 6e-8.
TOLERANCE = 2e-6


class Weights(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(size)
        self.table = nn.Parameter(torch.randn(256, size))
        self.weight = nn.Parameter(torch.randn(size))
        self.bias = nn.Parameter(torch.randn(size))
        self.head_weight = nn.Parameter(torch.randn(2, size // 2))


@pytest.fixture(params=[6, 16])
def weights(request: pytest.FixtureRequest) -> Weights:
    return Weights(request.param)


def _x(m: nn.Module, i: Inputs) -> torch.Tensor:
    return ew.embedding(i["ids"], m.table)


def _variance(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2).mean(-1, keepdim=True) + 1e-5


Spelling = Callable[[nn.Module, torch.Tensor], torch.Tensor]

RMS: dict[str, Spelling] = {
    "pow, rsqrt": lambda m, x: x * torch.rsqrt(_variance(x)) * m.weight,
    "weight first": lambda m, x: m.weight * (torch.rsqrt(_variance(x)) * x),
    "x * x": lambda m, x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * m.weight,
    "square": lambda m, x: x * torch.rsqrt(1e-5 + x.square().mean(-1, keepdim=True)) * m.weight,
    "over the root": lambda m, x: x / torch.sqrt(_variance(x)) * m.weight,
    "one over the root": lambda m, x: x * (1 / torch.sqrt(_variance(x))) * m.weight,
    "power": lambda m, x: x * _variance(x) ** -0.5 * m.weight,
    "Gemma": lambda m, x: x * torch.rsqrt(_variance(x)) * (1.0 + m.weight.float()),
    "aten": lambda m, x: aten.rms_norm.default(x, [x.shape[-1]], m.weight, 1e-5),
    "fused": lambda m, x: aten._fused_rms_norm.default(x, [x.shape[-1]], m.weight, 1e-5)[0],
}
LAYER: dict[str, Spelling] = {
    "aten": lambda m, x: aten.layer_norm.default(x, [x.shape[-1]], m.weight, m.bias, 1e-5),
    "native": lambda m, x: aten.native_layer_norm.default(x, [x.shape[-1]], m.weight, m.bias, 1e-5)[0],
    "Cohere": lambda m, x: _centred(x) * torch.rsqrt(_variance(_centred(x))) * m.weight + m.bias,
}


def _centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


@pytest.mark.parametrize("name", RMS)
def test_rms_norms(name: str, weights: Weights) -> None:
    program = program_from(lambda m, i: RMS[name](m, _x(m, i)), weights)
    rewrite(program, RemoveNoops(), FoldConstants(), NormalizeNorm(), tolerance=TOLERANCE)
    assert op_counts(program) == {"ew.embedding": 1, "ew.rms_norm": 1}
    (norm,) = program.nodes_of(ew.rms_norm.default)
    assert norm.args[1] is not None
    assert norm.args[2] == 1e-5


@pytest.mark.parametrize("name", LAYER)
def test_layer_norms(name: str, weights: Weights) -> None:
    program = program_from(lambda m, i: LAYER[name](m, _x(m, i)), weights)
    rewrite(program, MergeCommonSubexpressions(), NormalizeNorm(), tolerance=TOLERANCE)
    assert op_counts(program) == {"ew.embedding": 1, "ew.layer_norm": 1}
    (norm,) = program.nodes_of(ew.layer_norm.default)
    assert None not in norm.args


def test_without_a_weight(weights: Weights) -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        x = _x(m, i)
        plain = x * torch.rsqrt(_variance(x))
        return plain + aten.rms_norm.default(x, [x.shape[-1]]) + aten.layer_norm.default(x, [x.shape[-1]])

    program = program_from(call, weights)
    rewrite(program, NormalizeNorm(), tolerance=TOLERANCE)
    first, second = program.nodes_of(ew.rms_norm.default)
    assert first.args[1:] == (None, 1e-5)
    assert second.args[1:] == (None, torch.finfo(torch.float32).eps)
    assert op_counts(program)["ew.layer_norm"] == 1


def test_sixteen_bits_computed_wide(weights: Weights) -> None:
    """Llama's order: x to float32, normed, back to bfloat16, times the weight."""
    weights = weights.to(torch.bfloat16)

    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        x = _x(m, i).to(torch.bfloat16).float()  # tables of bfloat16 give float32
        return m.weight * (x * torch.rsqrt(_variance(x))).to(torch.bfloat16)

    program = program_from(call, weights)
    rewrite(program, NormalizeNorm(), tolerance=0.0)
    assert op_counts(program) == {"ew.embedding": 1, "aten._to_copy": 1, "ew.rms_norm": 1}


def test_a_weight_for_each_head_stays_a_product(weights: Weights) -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        x = _x(m, i).view(-1, 2, m.head_weight.shape[1])
        return (x * torch.rsqrt(_variance(x)) * m.head_weight).flatten(1)

    program = program_from(call, weights)
    (record,) = rewrite(program, NormalizeNorm(), tolerance=TOLERANCE)
    d = weights.head_weight.shape[1]
    assert record.matched == 1
    assert [r.reason for r in record.rejected] == [f"norm_weight: the weight has the shape [2, {d}], not [{d}]"]
    assert op_counts(program)["aten.mul"] == 1


NO_NORMS: dict[str, Spelling] = {
    "mean over tokens": lambda m, x: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5),
    "sum": lambda m, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5),
    "cube": lambda m, x: x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-5),
    "of another value": lambda m, x: (x * 2.0) * torch.rsqrt(_variance(x)),
    "no epsilon": lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
    "two dimensions": lambda m, x: aten.layer_norm.default(x.view(-1, 2, x.shape[1] // 2), [2, x.shape[1] // 2])[:, 0],
}


@pytest.mark.parametrize("name", NO_NORMS)
def test_what_is_no_norm(name: str, weights: Weights) -> None:
    program = program_from(lambda m, i: NO_NORMS[name](m, _x(m, i)), weights)
    (record,) = rewrite(program, NormalizeNorm())
    assert record.matched == 0
    if name == "two dimensions":
        assert [r.reason for r in record.rejected] == ["aten_layer_norm: it is taken over the last 2 dimensions"]
