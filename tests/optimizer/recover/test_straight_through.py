"""Gradients go past rounding as if it weren't there, but not farther out of the range of integers."""

from __future__ import annotations

import pytest
import torch

from enginewright.optimizer.recover.straight_through import RoundedWeight, straight_through
from enginewright.passes.ir.prequantized import CodeFormat, Codes, decode


@pytest.mark.parametrize("shape", [(3,), (2, 5)])
def test_the_value_is_the_rounded_one_and_the_gradient_the_exact_one_s(shape: tuple[int, ...]) -> None:
    exact = torch.linspace(-2, 2, torch.Size(shape).numel()).view(shape).requires_grad_()
    result = straight_through(exact, exact.detach().round())
    assert torch.equal(result, exact.detach().round())
    weights = torch.arange(result.numel()).view(shape) + 1.0
    (result * weights).sum().backward()
    assert exact.grad is not None and torch.equal(exact.grad, weights)


def test_what_is_beyond_may_come_back_and_not_go_farther() -> None:
    """A step goes against the gradient: a negative one would make a value larger."""
    exact = torch.zeros(6, requires_grad=True)
    beyond = torch.tensor([1, 1, -1, -1, 0, 0], dtype=torch.int8)
    result = straight_through(exact, torch.zeros(6), beyond)
    (result * torch.tensor([-2.0, 2, 2, -2, -2, 2])).sum().backward()
    assert exact.grad is not None and exact.grad.tolist() == [0, 2, 0, -2, -2, 2]


@pytest.mark.parametrize("group", [4, 8])
def test_only_values_more_than_half_a_step_off_are_beyond(group: int) -> None:
    scales = torch.full((2, 8 // group), 0.5).half()
    values = torch.full((2, 8), 7, dtype=torch.int8)
    codes, form = Codes(values, scales), CodeFormat(4, group)
    weight = decode(codes, form)
    assert RoundedWeight.from_codes(weight, codes, form).beyond is None
    weight[0, 0] += 0.25  # half a step: the nearest integer all the same
    weight[0, 1] += 0.3
    weight[1, 7] -= 0.3
    rounded = RoundedWeight.from_codes(weight, codes, form)
    assert torch.equal(rounded.value, decode(codes, form)) and rounded.beyond is not None
    assert rounded.beyond.nonzero().tolist() == [[0, 1], [1, 7]]
    assert (rounded.beyond[0, 1], rounded.beyond[1, 7]) == (1, -1)


def test_a_group_that_has_vanished_lets_every_gradient_through() -> None:
    codes = Codes(torch.zeros(1, 4, dtype=torch.int8), torch.zeros(1, 1).half())
    rounded = RoundedWeight.from_codes(torch.tensor([[1e-9, -1e-9, 0, 3.0]]), codes, CodeFormat(4, 4))
    assert rounded.beyond is None
