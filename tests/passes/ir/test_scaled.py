from __future__ import annotations

import pytest
import torch

from enginewright.passes.ir.provenance import Part
from enginewright.passes.ir.scaled import Factors, Scaled
from enginewright.passes.ir.stacked_weights import Stack, pieces
from enginewright.passes.ir.weights import Source
from enginewright.runtime.shared.errors import PassError


def source(value: torch.Tensor, name: str = "w") -> Source:
    return Source(name, tuple(value.shape), value.dtype, lambda: value)


@pytest.mark.parametrize("shape", [(3, 5), (2, 7, 4)])
@pytest.mark.parametrize("axis", [-1, -2])
def test_rows_or_columns_are_multiplied_or_divided(shape: tuple[int, ...], axis: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    factors = torch.rand([n if i == len(shape) + axis else 1 for i, n in enumerate(shape)]) + 0.5
    for divide in (False, True):
        scaled = Scaled(source(weight.bfloat16()), Factors("s", factors), divide)
        assert (scaled.shape, scaled.dtype) == (shape, torch.float32)
        wide = weight.bfloat16().float()
        assert torch.equal(scaled.evaluate(), wide / factors if divide else wide * factors)
        assert scaled.parts(1) == (Part("w", 0, shape[1], 1),)


def test_experts_are_scaled_one_by_one() -> None:
    torch.manual_seed(0)
    experts = [torch.randn(3, 4) for _ in range(2)]
    stack = Stack(tuple(source(e, f"e{i}") for i, e in enumerate(experts)))
    for factors in (torch.rand(2, 1, 4), torch.rand(1, 1, 4)):  # of each, and one for all
        scaled = Scaled(stack, Factors("s", factors))
        one_by_one = pieces(scaled)
        assert [p.shape for p in one_by_one] == [(1, 3, 4)] * 2
        assert torch.equal(torch.cat([p.evaluate() for p in one_by_one]), torch.stack(experts) * factors)
        assert one_by_one[1].parts(0) == (Part("e1", 0, 3),)


def test_equal_factors_make_equal_weights() -> None:
    base = source(torch.ones(2, 2))
    one, same, other = (Scaled(base, Factors("s", torch.tensor([[1.0, x]]))) for x in (2.0, 2.0, 3.0))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one.describe() == "w * s"
    assert Scaled(base, one.factors, divide=True).describe() == "w / s"


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3, 2)])
def test_factors_must_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(PassError, match=r"factors .* for a weight"):
        Scaled(source(torch.ones(2, 2)), Factors("s", torch.ones(shape)))


def test_integers_have_no_factors() -> None:
    with pytest.raises(PassError, match="int8"):
        Scaled(source(torch.ones(2, 2, dtype=torch.int8)), Factors("s", torch.ones(1, 2)))
