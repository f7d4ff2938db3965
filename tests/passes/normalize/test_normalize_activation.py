from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from enginewright.passes.normalize.normalize_activation import NormalizeActivation
from tests.passes.rewriting import op_counts, rewrite
from tests.passes.small_programs import program_from

ew = torch.ops.ew

TANH, ERF = math.sqrt(2 / math.pi), math.sqrt(2)

SPELLINGS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": ("silu", lambda x: torch.sigmoid(x) * x),
    "gelu_new": ("tanh", lambda x: 0.5 * x * (1.0 + torch.tanh(TANH * (x + 0.044715 * x.pow(3.0))))),
    "gelu_fast": ("tanh", lambda x: 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * x * (x * x))))),
    "factored": ("tanh", lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))),
    "squared": ("tanh", lambda x: 0.5 * x * (1.0 + torch.tanh(x * TANH * (1.0 + 0.044715 * x.pow(2))))),
    "half last": ("tanh", lambda x: x * (torch.tanh((x + x * (x * x) * 0.044715) * TANH) + 1.0) * 0.5),
    "erf": ("none", lambda x: x * 0.5 * (1.0 + torch.erf(x / ERF))),
    "erf times": ("none", lambda x: x * ((torch.erf(x * 0.7071067811865476) + 1.0) * 0.5)),
}
OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "another's sigmoid": lambda x: x * torch.sigmoid(x + 1.0),
    "another cubic": lambda x: 0.5 * x * (1.0 + torch.tanh(TANH * (x + 0.05 * x.pow(3.0)))),
    "another slope": lambda x: 0.5 * x * (1.0 + torch.erf(x / 1.5)),
    "no half": lambda x: x * (1.0 + torch.erf(x / ERF)),
}


class Table(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.table = nn.Parameter(torch.randn(256, width) * 2)


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("width", [5, 16])
def test_spellings(name: str, width: int) -> None:
    kind, spelled = SPELLINGS[name]
    program = program_from(lambda m, i: spelled(ew.embedding(i["ids"], m.table)), Table(width))
    rewrite(program, NormalizeActivation(), tolerance=2e-6)  # values up to 8, each within two roundings
    (node,) = [n for n in program.graph.nodes if n.op == "call_function" and "embedding" not in str(n.target)]
    assert node.target is (torch.ops.aten.silu.default if kind == "silu" else torch.ops.aten.gelu.default)
    assert node.kwargs.get("approximate", kind) == kind


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str) -> None:
    program = program_from(lambda m, i: OTHERS[name](ew.embedding(i["ids"], m.table)), Table(5))
    before = op_counts(program)
    (record,) = rewrite(program, NormalizeActivation())
    assert record.matched == 0
    assert op_counts(program) == before
    if name == "another cubic":
        assert [r.reason for r in record.rejected] == ["gelu_tanh: has 0.05 where GELU has 0.044715"]
