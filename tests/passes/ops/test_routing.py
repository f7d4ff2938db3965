"""ew.route_experts and ew.combine_experts against loops over tokens and places."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from enginewright.passes.ops.routing import combine_experts, route_experts

SIZES = [(1, 1, 3), (13, 2, 4), (50, 6, 9)]  # T, k, E


@pytest.mark.parametrize(("tokens", "choices", "experts"), SIZES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_places_are_sorted_by_expert_and_stable(tokens, choices, experts, dtype):
    torch.manual_seed(1)
    ids = torch.randint(experts, (tokens, choices), dtype=dtype)
    order, rows, starts = route_experts(ids, experts)
    want = sorted(range(tokens * choices), key=lambda place: (ids.reshape(-1)[place].item(), place))
    assert order.tolist() == want
    assert rows.tolist() == [place // choices for place in want]
    assert starts.tolist() == [int((ids < e).sum()) for e in range(experts + 1)]
    assert {order.dtype, rows.dtype, starts.dtype} == {dtype}
    opcheck(torch.ops.ew.route_experts.default, (ids, experts))


@pytest.mark.parametrize("bad", [-1, 3])
def test_ids_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match="none of 3"):
        route_experts(torch.tensor([[0, bad]]), 3)


@pytest.mark.parametrize(("tokens", "choices", "experts"), SIZES)
def test_combine_sums_a_tokens_choices_in_their_order(tokens, choices, experts):
    torch.manual_seed(2)
    ids = torch.randint(experts, (tokens, choices))
    order, _, _ = route_experts(ids, experts)
    y, weights = torch.randn(tokens * choices, 5), torch.rand(tokens, choices)
    want = torch.zeros(tokens, 5)
    for row, place in enumerate(order.tolist()):
        want[place // choices] += weights[place // choices, place % choices] * y[row]
    # Up to 6 products of numbers of magnitude 1, in another order.
    torch.testing.assert_close(combine_experts(y, order, weights), want, rtol=1e-5, atol=1e-5)
    opcheck(torch.ops.ew.combine_experts.default, (y, order, weights))


def test_combine_begins_with_the_first_choice():
    y = torch.tensor([[-(2.0**24)], [2.0**24], [1.0]])
    weights, order = torch.ones(1, 3), torch.tensor([2, 0, 1])  # in order of places: 2^24, 1, -2^24
    assert combine_experts(y, order, weights).item() == 0.0  # 2^24 + 1 rounds to 2^24
