"""The norms against definitions and other implementations."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from enginewright.passes.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm

SIZES = [(3, 8), (2, 5, 96)]
# Elementwise after one sum of <= 96 terms: a few ulp.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


@pytest.mark.parametrize("shape", SIZES)
def test_rms_norm_equals_transformers(shape):
    torch.manual_seed(1)
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    module = LlamaRMSNorm(shape[-1], eps=1e-5)
    module.weight.data = weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), module(x).detach(), **TOLERANCE)
    torch.testing.assert_close(rms_norm(x, None, 1e-5) * weight, module(x).detach(), **TOLERANCE)
    assert (rms_norm(x, weight, 1.0) - module(x)).abs().max() > 1e-3  # eps counts


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_is_its_definition(shape, affine):
    torch.manual_seed(2)
    x = torch.randn(shape) * 3 + 1
    weight, bias = (torch.randn(shape[-1]), torch.randn(shape[-1])) if affine else (None, None)
    wide = x.double()
    want = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    if affine:
        want = want * weight + bias
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5), want.float(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shape", SIZES)
def test_adding_forms_return_norm_and_sum(shape):
    torch.manual_seed(3)
    x, r, w, b = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])
    for (normed, total), want in (
        (add_rms_norm(x, r, w, 1e-6), rms_norm(x + r, w, 1e-6)),
        (add_layer_norm(x, r, w, b, 1e-6), layer_norm(x + r, w, b, 1e-6)),
    ):
        assert torch.equal(total, x + r)
        assert torch.equal(normed, want)


@pytest.mark.parametrize("shape", SIZES)
def test_fakes_agree(shape):
    x, w = torch.randn(shape), torch.randn(shape[-1])
    strided = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    opcheck(torch.ops.ew.rms_norm.default, (x, w, 1e-5))
    opcheck(torch.ops.ew.rms_norm.default, (strided, None, 1e-5))
    opcheck(torch.ops.ew.layer_norm.default, (strided, w, None, 1e-5))
    opcheck(torch.ops.ew.add_rms_norm.default, (x, x * 2, w, 1e-5))
    opcheck(torch.ops.ew.add_layer_norm.default, (x, x * 2, w, w * 2, 1e-5))
