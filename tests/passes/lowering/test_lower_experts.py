"""Experts, lowered and run by the reference interpreter."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.experts.lower_experts import LowerExperts
from enginewright.passes.framework.base import PassContext
from enginewright.passes.lowering.lower_program import lower_program
from enginewright.runtime.shared.errors import UnsupportedModelError
from tests.passes.lowering.lowered import check, features, ops
from tests.passes.small_programs import program_from

ew = torch.ops.ew


class Experts(torch.nn.Module):
    def __init__(self, experts: int, width: int, biased: bool) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.router = torch.nn.Parameter(torch.randn(experts, 6))
        self.gate_up = torch.nn.Parameter(torch.randn(experts, 2 * width, 6) / 3)
        self.down = torch.nn.Parameter(torch.randn(experts, 6, width) / 3)
        self.gate_up_bias = torch.nn.Parameter(torch.randn(experts, 2 * width)) if biased else None
        self.down_bias = torch.nn.Parameter(torch.randn(experts, 6)) if biased else None


@pytest.mark.parametrize(("experts", "width", "biased", "limit"), [(3, 5, False, 0.0), (7, 40, True, 0.5)])
def test_experts(experts: int, width: int, biased: bool, limit: float) -> None:
    def call(m: Experts, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = features(i)
        weights, ids = ew.linear(x, m.router, None).softmax(-1).topk(2, -1)
        y = ew.moe(
            x, ids, weights, m.gate_up, m.gate_up_bias, m.down, m.down_bias, "silu", limit=limit, offset=2 * limit
        )
        return ew.take_rows(y, i["rows"])

    program = program_from(call, Experts(experts, width, biased))
    LowerExperts().run(program, PassContext())
    # Sums over at most 40 products, by one expert's rows at a time on both sides.
    lowered = check(program, atol=1e-5)
    assert [op for op in ops(lowered) if "expert" in op or "grouped" in op] == [
        *("route_experts", "grouped_linear", "grouped_linear", "combine_experts")
    ]
    assert {w.name: w.layout for w in lowered.weights if len(w.shape) == 3} == {
        "gate_up": "panel32",
        "down": "panel32",
    }


def test_computed_weights_are_refused() -> None:
    def call(m: Experts, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = features(i)
        _, rows, starts = ew.route_experts(x.topk(1, -1)[1], 6)
        weight = x[:1, :, None] * m.gate_up[0, :6]
        return ew.take_rows(ew.grouped_linear(ew.take_rows(x, rows), starts, weight.expand(6, 6, 6), None), i["rows"])

    with pytest.raises(UnsupportedModelError, match="packs weights ahead"):
        lower_program(program_from(call, Experts(3, 5, False)))
