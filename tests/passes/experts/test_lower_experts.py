"""ew.moe becomes grouped linears with the same numbers."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.experts.lower_experts import LowerExperts
from enginewright.passes.framework.base import PassContext
from enginewright.passes.fusion.sink_take_rows import SinkTakeRows
from enginewright.passes.ir.provenance import WHERE
from enginewright.passes.ops.experts import EXPERT_KINDS
from tests.passes.rewriting import op_counts
from tests.passes.small_programs import program_from

ew = torch.ops.ew
EXPERTS, CHOICES, HIDDEN, WIDTH = 5, 2, 16, 12

PLAIN = [(kind, gated, 1.0, 0.0, 0.0) for kind in EXPERT_KINDS for gated in (True, False)]
CLAMPED = [
    ("silu", True, 1.702, 2.0, 1.0),
    ("silu", True, 1.0, 2.0, 0.0),
    ("gelu", True, 1.0, 0.0, -0.5),
    ("silu", False, 1.702, 0.0, 0.0),
]


def program(kind, gated, alpha, limit, offset, biased, experts=EXPERTS, choices=CHOICES):
    """T tokens of HIDDEN numbers made of ids go through one layer of experts."""
    torch.manual_seed(9)
    inner = 2 * WIDTH if gated else WIDTH

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(250, HIDDEN))
            self.router = torch.nn.Parameter(torch.randn(experts, HIDDEN))
            self.gate_up = torch.nn.Parameter(torch.randn(experts, inner, HIDDEN))
            self.down = torch.nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / 4)
            self.gate_up_bias = torch.nn.Parameter(torch.randn(experts, inner)) if biased else None
            self.down_bias = torch.nn.Parameter(torch.randn(experts, HIDDEN)) if biased else None

    def call(self, inputs):
        x = ew.embedding(inputs["ids"], self.table)
        weights, ids = ew.linear(x, self.router, None).softmax(-1).topk(choices)
        out = ew.moe(
            x, ids, weights, self.gate_up, self.gate_up_bias, self.down, self.down_bias,
            kind, gated, alpha, limit, offset,
        )  # fmt: skip
        return ew.take_rows(out, inputs["rows"])

    return program_from(call, Experts())


@pytest.mark.parametrize(
    ("activation", "biased"), [(a, i % 2 == 0) for i, a in enumerate(PLAIN[::2] + CLAMPED + PLAIN[-1:])]
)
def test_has_the_same_numbers(activation, biased):
    captured = program(*activation, biased)
    lowered = captured.copy()
    record = LowerExperts().run(lowered, PassContext())
    assert record.matched == 1
    counts = op_counts(lowered)
    assert counts["ew.grouped_linear"] == 2 and counts["ew.route_experts"] == counts["ew.combine_experts"] == 1
    plain = activation[1] and activation[0] != "relu2" and activation[2:] == (1.0, 0.0, 0.0)
    assert counts["ew.gated_activation"] == (1 if plain else 0)
    for tokens in (1, 23):
        inputs = {name: torch.arange(tokens, dtype=torch.int32) * 7 % 250 for name in captured.inputs}
        inputs["rows"] = torch.arange(tokens, dtype=torch.int32)
        # The same ops in the same order, but for the clamps and products of one element each.
        torch.testing.assert_close(lowered.evaluate(inputs)[0], captured.evaluate(inputs)[0], rtol=1e-6, atol=1e-6)
    grouped = lowered.nodes_of(ew.grouped_linear.default)[0]
    assert grouped.meta[WHERE] == captured.nodes_of(ew.moe.default)[0].meta[WHERE]


@pytest.mark.parametrize(("experts", "choices"), [(1, 1), (40, 1), (3, 3)])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_few_experts_few_choices_and_no_rows(experts, choices, tokens):
    """One expert; most without a token; all of them for each; and steps that sample nothing."""
    captured = program(*PLAIN[0], True, experts, choices)
    lowered = captured.copy()
    LowerExperts().run(lowered, PassContext())
    inputs = {name: torch.arange(9, dtype=torch.int32) * 7 % 250 for name in captured.inputs}
    inputs["rows"] = torch.arange(tokens, dtype=torch.int32)
    got = lowered.evaluate(inputs)[0]
    assert got.shape == (tokens, HIDDEN)
    # The same ops in the same order.
    torch.testing.assert_close(got, captured.evaluate(inputs)[0], rtol=1e-6, atol=1e-6)
    sunk = captured.copy()
    assert SinkTakeRows().run(sunk, PassContext()).matched > 0
    LowerExperts().run(sunk, PassContext())
    # Products of fewer rows may be blocked in another way by BLAS: float32 rounding of results of size 10.
    torch.testing.assert_close(sunk.evaluate(inputs)[0], got, rtol=1e-5, atol=1e-5)


def test_a_program_without_experts_stays():
    def call(self, inputs):
        return ew.take_rows(ew.embedding(inputs["ids"], self.table), inputs["rows"])

    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(250, 8))

    dense = program_from(call, Table())
    before = op_counts(dense)
    assert LowerExperts().run(dense, PassContext()).matched == 0
    assert op_counts(dense) == before
