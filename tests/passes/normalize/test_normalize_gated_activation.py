from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from enginewright.passes.cleanup.remove_noops import RemoveNoops
from enginewright.passes.normalize.normalize_gated_activation import NormalizeGatedActivation
from tests.passes.rewriting import op_counts, rewrite
from tests.passes.small_programs import program_from

aten, ew = torch.ops.aten, torch.ops.ew
Inputs = dict[str, torch.Tensor]

KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}


class Mlp(nn.Module):
    def __init__(self, k: int, inner: int) -> None:
        super().__init__()
        torch.manual_seed(k)
        self.table = nn.Parameter(torch.randn(256, k))
        self.gate = nn.Parameter(torch.randn(inner, k))
        self.up = nn.Parameter(torch.randn(inner, k))
        self.both = nn.Parameter(torch.randn(2 * inner, k))


def _x(m: nn.Module, i: Inputs) -> torch.Tensor:
    return ew.embedding(i["ids"], m.table)


@pytest.fixture(params=[(4, 6), (8, 16)])
def mlp(request: pytest.FixtureRequest) -> Mlp:
    return Mlp(*request.param)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("swapped", [False, True])
def test_two_linears(kind: str, swapped: bool, mlp: Mlp) -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        x = _x(m, i)
        gate, up = KINDS[kind](ew.linear(x, m.gate, None)), ew.linear(x, m.up, None)
        return up * gate if swapped else gate * up

    program = program_from(call, mlp)
    # The activation of a slice may take another vector path, and in GELU 1 + erf cancels: for a gate of -4 and an up
    # of 10 a rounding of erf is 20 * 6e-8.
    rewrite(program, NormalizeGatedActivation(), tolerance=1e-5)
    assert op_counts(program) == {"ew.embedding": 1, "ew.linear": 2, "aten.cat": 1, "ew.gated_activation": 1}
    (gated,) = program.nodes_of(ew.gated_activation.default)
    assert gated.args[1] == kind
    gate, up = gated.args[0].args[0]
    assert (gate.args[1].target, up.args[1].target) == ("gate", "up")


def test_halves_of_one_linear(mlp: Mlp) -> None:
    """Phi-3: the linear's result goes in as it is."""

    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        gate, up = ew.linear(_x(m, i), m.both, None).chunk(2, -1)
        return up * F.silu(gate)

    program = program_from(call, mlp)
    rewrite(program, RemoveNoops(), NormalizeGatedActivation(), tolerance=1e-6)
    assert op_counts(program) == {"ew.embedding": 1, "ew.linear": 1, "ew.gated_activation": 1}


def _reason(call: Callable[[nn.Module, torch.Tensor], torch.Tensor], mlp: Mlp) -> str:
    program = program_from(lambda m, i: call(m, _x(m, i)), mlp)
    _, record = rewrite(program, RemoveNoops(), NormalizeGatedActivation())
    assert op_counts(program)["ew.gated_activation"] == 0
    (rejection,) = record.rejected
    return rejection.reason


def test_reasons(mlp: Mlp) -> None:
    apart = "gated_activation: gate and up are neither the halves of one value nor linears of one value"
    k = mlp.gate.shape[1]

    def halves(m: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = ew.linear(x, m.both, None).chunk(2, -1)
        return first, second

    assert _reason(lambda m, x: halves(m, x)[0] * F.silu(halves(m, x)[1]), mlp) == apart
    assert _reason(lambda m, x: F.silu(ew.linear(x, m.gate, None)) * ew.linear(x + 1, m.up, None), mlp) == apart
    assert _reason(lambda m, x: F.silu(x) * torch.tanh(x), mlp) == apart
    assert _reason(lambda m, x: F.silu(x[:, :1]) * torch.tanh(x), mlp).endswith(f"the shapes [T, 1] and [T, {k}]")


def test_an_activation_alone_stays(mlp: Mlp) -> None:
    program = program_from(lambda m, i: F.silu(_x(m, i)) * 2.0, mlp)
    (record,) = rewrite(program, NormalizeGatedActivation())
    assert (record.matched, record.rejected) == (0, ())
