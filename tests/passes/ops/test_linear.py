"""ew.linear against definitions and other implementations."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from enginewright.passes.ops.linear import linear


@pytest.mark.parametrize(("shape", "n"), [((3, 8), 5), ((2, 7, 48), 33)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_is_its_definition(shape, n, with_bias):
    torch.manual_seed(7)
    x, weight = torch.randn(shape), torch.randn(n, shape[-1])
    bias = torch.randn(n) if with_bias else None
    want = (x[..., None, :].double() * weight.double()).sum(-1) + (0 if bias is None else bias)
    # Sums of at most 48 products in f32.
    torch.testing.assert_close(linear(x, weight, bias), want.float(), rtol=1e-5, atol=1e-5)
    opcheck(torch.ops.ew.linear.default, (x, weight, bias))


def test_mismatched_sizes_are_refused():
    with pytest.raises(RuntimeError):
        linear(torch.randn(3, 8), torch.randn(5, 7), None)
    with pytest.raises(RuntimeError, match="differ in K"):
        torch.ops.ew.linear(torch.randn(3, 8, device="meta"), torch.randn(5, 7, device="meta"), None)


@pytest.mark.parametrize(("m", "n", "k"), [(3, 5, 8), (2, 33, 48)])
def test_sixteen_bit_factors_are_summed_in_32(m, n, k):
    torch.manual_seed(8)
    x, weight, bias = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.randn(n)
    got = linear(x, weight, bias)
    assert got.dtype is torch.float32
    # The products of the rounded factors are exact in float32; at most 48 of them are summed.
    torch.testing.assert_close(got, (x.double() @ weight.double().t() + bias).float(), rtol=1e-5, atol=1e-5)
    opcheck(torch.ops.ew.linear.default, (x, weight, bias))
    with pytest.raises(RuntimeError, match=r"x is torch.float32, weight torch.bfloat16"):
        torch.ops.ew.linear(x.float().to("meta"), weight.to("meta"), None)
