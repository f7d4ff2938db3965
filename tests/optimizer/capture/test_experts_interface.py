"""Experts of transformers: every layout becomes ew.moe, recognised by its values, and the rest is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.integrations.moe import batched_mm_experts_forward, use_experts_implementation

from enginewright.optimizer.capture import experts_interface
from enginewright.optimizer.capture.experts_interface import Activation, experts_function, find_activation
from enginewright.runtime.shared.errors import UnsupportedModelError

EXPERTS, HIDDEN, WIDTH, TOKENS = 5, 12, 8, 9


def layer(*, act="silu", gate=None, transposed=False, biased=False, gated=True, concatenated=True, post_norm=False):
    """A layer of random experts as transformers decorates them; ``gate`` replaces its _apply_gate."""

    @use_experts_implementation(
        is_concatenated=concatenated,
        is_transposed=transposed,
        has_bias=biased,
        has_gate=gated,
        has_post_expert_norm=post_norm,
    )
    class Experts(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = EXPERTS
            inner, first = (2 * WIDTH if gated else WIDTH), "gate_up_proj" if gated else "up_proj"
            for name, rows, columns in ((first, inner, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
                shape = (EXPERTS, columns, rows) if transposed else (EXPERTS, rows, columns)
                setattr(self, name, torch.nn.Parameter(torch.randn(shape) / 3))
                if biased:
                    setattr(self, f"{name}_bias", torch.nn.Parameter(torch.randn(EXPERTS, rows)))
            self.act_fn = ACT2FN[act]

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("the interface is in the way")

    if gate is not None:
        Experts._apply_gate = gate
    torch.manual_seed(7)
    return Experts(SimpleNamespace(_experts_implementation=experts_interface.NAME))


def routing():
    torch.manual_seed(8)
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(TOKENS)])
    return torch.randn(TOKENS, HIDDEN), ids, torch.rand(TOKENS, 2)


def clamped_taking_turns(self, gate_up):
    gate, up = gate_up[..., ::2].clamp(max=1.5), gate_up[..., 1::2].clamp(-1.5, 1.5)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


def clamped_silu(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=2.0)) * up.clamp(-2.0, 2.0)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"act": "gelu"},
        {"act": "gelu_pytorch_tanh", "biased": True},
        {"act": "quick_gelu"},
        {"act": "relu2"},
        {"transposed": True},
        {"transposed": True, "biased": True, "concatenated": False, "gate": clamped_taking_turns},
        {"gate": clamped_silu},
        {"gated": False, "act": "relu2"},
        {"gated": False, "act": "silu", "biased": True, "transposed": True},
    ],
)
def test_is_what_transformers_computes(how):
    experts_interface.register()
    experts, arguments = layer(**how), routing()
    with torch.no_grad():
        got, want = experts(*arguments), batched_mm_experts_forward(experts, *arguments)
    # Sums of at most 12 products of numbers of magnitude 1, in another order.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [3, 32])
@pytest.mark.parametrize(
    "activation",
    [
        Activation("silu", True),
        Activation("gelu", True),
        Activation("gelu_tanh", True),
        Activation("relu", True),
        Activation("sigmoid", True),
        Activation("relu2", True),
        Activation("silu", True, alpha=1.702, limit=7.0, offset=1.0),
        Activation("silu", True, limit=10.0),
        Activation("gelu", True, offset=-0.5),
        Activation("silu", False),
        Activation("relu2", False),
        Activation("silu", False, alpha=1.702),
    ],
)
def test_activations_are_told_by_their_values(activation, width):
    assert find_activation(activation, width, gated=activation.gated) == activation


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[..., :4] * x[..., 4:],
        lambda x: torch.nn.functional.silu(x[..., 4:]) * x[..., :4],  # up before gate
        lambda x: torch.nn.functional.elu(x[..., :4]) * x[..., 4:],
        lambda x: torch.nn.functional.silu(x[..., :4]) * x[..., 4:].flip(-1),
        lambda x: torch.nn.functional.silu(x[..., :4]).clamp(max=5) * x[..., 4:].clamp(-7, 7),
        lambda x: torch.nn.functional.silu(x[..., :4]) * x[..., 4:] + 1,
    ],
    ids=["bilinear", "swapped", "elu", "reversed", "other clamp", "shifted"],
)
def test_other_functions_are_none_of_ours(function):
    assert find_activation(function, 4, gated=True) is None


def test_what_has_no_meaning_is_refused():
    experts_interface.register()
    arguments = routing()
    with pytest.raises(UnsupportedModelError, match=r"Experts: the activation of its experts"):
        layer(act="mish")(*arguments)
    with pytest.raises(UnsupportedModelError, match="a norm after each expert"):
        layer(post_norm=True)(*arguments)
    with pytest.raises(UnsupportedModelError, match="scale besides the router's choice"):
        experts_function(layer(), *arguments, scale=2.0)
    with pytest.raises(UnsupportedModelError, match="rank 3, 2 and 2"):
        experts_function(layer(), arguments[0][None], *arguments[1:])
