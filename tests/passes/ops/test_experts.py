"""ew.moe and ew.grouped_linear against one expert at a time."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from enginewright.passes.ops.experts import EXPERT_KINDS, expert_activation, grouped_linear, moe
from enginewright.passes.ops.routing import route_experts

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
"""Sums of at most 48 products of numbers of magnitude 1, in another order."""


@pytest.mark.parametrize(("tokens", "hidden", "width", "experts", "choices"), [(1, 8, 4, 2, 1), (17, 24, 16, 6, 3)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_moe_is_the_sum_over_choices(tokens, hidden, width, experts, choices, gated, biased):
    torch.manual_seed(3)
    x = torch.randn(tokens, hidden)
    ids = torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)])
    weights = torch.rand(tokens, choices)
    inner = 2 * width if gated else width
    gate_up, down = torch.randn(experts, inner, hidden) / 5, torch.randn(experts, hidden, width) / 4
    biases = (torch.randn(experts, inner), torch.randn(experts, hidden)) if biased else (None, None)
    want = torch.zeros(tokens, hidden)
    for t in range(tokens):
        for j, e in enumerate(ids[t].tolist()):
            y = gate_up[e] @ x[t] + (biases[0][e] if biased else 0)
            y = torch.nn.functional.silu(y[:width]) * (y[width:] if gated else 1)
            want[t] += weights[t, j] * (down[e] @ y + (biases[1][e] if biased else 0))
    arguments = (x, ids, weights, gate_up, biases[0], down, biases[1], "silu", gated)
    torch.testing.assert_close(moe(*arguments), want, **TOLERANCE)
    opcheck(torch.ops.ew.moe.default, arguments)


@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_plain_kinds(kind):
    torch.manual_seed(4)
    gate, up = torch.randn(5, 6) * 3, torch.randn(5, 6)
    functions = {"gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}
    functions |= {"relu2": lambda x: torch.relu(x) ** 2, "sigmoid": torch.sigmoid}
    act = functions.get(kind) or getattr(torch.nn.functional, kind)
    torch.testing.assert_close(expert_activation(torch.cat([gate, up], 1), kind, True, 1.0, 0.0, 0.0), act(gate) * up)
    torch.testing.assert_close(expert_activation(gate, kind, False, 1.0, 0.0, 0.0), act(gate))


def test_clamped_swiglu():
    gate, up = torch.tensor([9.0, -9.0, 0.5]), torch.tensor([8.0, -8.0, 0.25])
    got = expert_activation(torch.cat([gate, up]), "silu", True, 1.702, 7.0, 1.0)
    clamped = torch.tensor([7.0, -9.0, 0.5])  # a gate has no lower limit
    want = clamped * torch.sigmoid(1.702 * clamped) * torch.tensor([8.0, -6.0, 1.25])
    torch.testing.assert_close(got, want)
    assert expert_activation(torch.tensor([9.0]), "silu", False, 1.0, 7.0, 0.0).item() == pytest.approx(
        6.9936, abs=1e-4
    )


def test_unknown_kinds_are_refused():
    for kind, alpha in (("swish", 1.0), ("gelu", 1.702)):
        with pytest.raises(ValueError, match=f"kind '{kind}'"):
            expert_activation(torch.zeros(2), kind, True, alpha, 0.0, 0.0)


def test_shapes_that_do_not_fit_are_refused():
    x, ids, weights = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 2)
    with pytest.raises(RuntimeError, match="don't fit together"):
        torch.ops.ew.moe(
            *(t.to("meta") for t in (x, ids, weights)), torch.zeros(4, 6, 8, device="meta"), None,
            torch.zeros(4, 8, 6, device="meta"), None, "silu",
        )  # fmt: skip
    with pytest.raises(RuntimeError, match="differ in K"):
        torch.ops.ew.grouped_linear(
            x.to("meta"), torch.zeros(5, dtype=torch.long, device="meta"), torch.zeros(4, 6, 9, device="meta"), None
        )


@pytest.mark.parametrize("ids", [[[2], [0], [2], [2]], [[3], [3], [3], [3]]])  # experts 1 and 3, or 0 to 2, get no row
@pytest.mark.parametrize("biased", [True, False])
def test_grouped_linear_is_a_linear_for_each_expert(ids, biased):
    torch.manual_seed(5)
    experts, hidden, width = 4, 12, 7
    _, rows, starts = route_experts(torch.tensor(ids, dtype=torch.int32), experts)
    x, weight = torch.randn(len(ids), hidden)[rows.long()], torch.randn(experts, width, hidden)
    bias = torch.randn(experts, width) if biased else None
    chosen = [ids[t][0] for t in rows.tolist()]
    want = torch.stack([weight[e] @ x[m] + (bias[e] if biased else 0) for m, e in enumerate(chosen)])
    torch.testing.assert_close(grouped_linear(x, starts, weight, bias), want, **TOLERANCE)
    opcheck(torch.ops.ew.grouped_linear.default, (x, starts, weight, bias))


def test_grouped_linear_of_bf16_sums_in_f32():
    torch.manual_seed(6)
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(1, 5, 64).bfloat16()
    got = grouped_linear(x, torch.tensor([0, 3]), weight, torch.ones(1, 5))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x.float() @ weight[0].float().T + 1)
