"""ew.gated_activation against definitions and other implementations."""

from __future__ import annotations

import math

import pytest
import torch
from torch.library import opcheck

from enginewright.passes.ops.activation import ACTIVATIONS, gated_activation

BY_HAND = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
}


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 96)])
@pytest.mark.parametrize("kind", sorted(BY_HAND))
def test_is_its_definition(shape, kind):
    torch.manual_seed(6)
    gate_up = torch.randn(shape) * 3
    half = shape[-1] // 2
    want = gate_up[..., :half].double().apply_(BY_HAND[kind]) * gate_up[..., half:]
    # One elementwise function in f32 against f64; 1 + erf cancels for gates far below 0, times an up of up to 10.
    torch.testing.assert_close(gated_activation(gate_up, kind), want.float(), rtol=1e-5, atol=5e-6)
    opcheck(torch.ops.ew.gated_activation.default, (gate_up, kind))


def test_kinds():
    assert sorted(ACTIVATIONS) == sorted(BY_HAND)
    with pytest.raises(ValueError, match="unknown kind 'swish'"):
        gated_activation(torch.randn(2, 4), "swish")
