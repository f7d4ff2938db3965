"""The experts function through which every mixture of experts of transformers is captured.

transformers calls a registered function with a layer's parameters and a few switches for their layout; our function
becomes a single ``ew.moe`` in the traced graph. Weights in other layouts are reordered by ops on weights, which
constant folding turns into expressions. Between its two linears a layer calls a Python method, the activation. It is
recognised by evaluating it at chosen points, and then compared with the activation of ``ew.moe``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from enginewright.passes.ops.experts import EXPERT_KINDS, expert_activation
from enginewright.runtime.shared.errors import UnsupportedModelError

from .attention_interface import path_of

NAME = "enginewright"
"""The experts implementation under which our function is registered in transformers."""

_TOLERANCE = 1e-5
"""The largest difference at which two functions count as equal, relative to values of magnitude 1 and more.

Some models evaluate theirs in float32.
"""

_DIGITS = 6
"""Significant digits to which a parameter of an activation, such as 1.702, is rounded after it was measured."""


@dataclass(frozen=True)
class Activation:
    """The function between an expert's two linears, as the arguments of ``expert_activation``."""

    kind: str
    gated: bool
    alpha: float = 1.0
    limit: float = 0.0
    offset: float = 0.0

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Applies the activation: gate_up [.., 2I] if gated, else [.., I] -> [.., I]."""
        return expert_activation(gate_up, *astuple(self))


def register() -> None:
    """Makes the implementation ``NAME`` known to transformers. May be called again."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_function)


def experts_function(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, **others: Any
) -> torch.Tensor:
    """Computes a mixture of experts for transformers: hidden_states [T, H], top_k_index and top_k_weights [T, k] -> [T,
    H].

    Raises UnsupportedModelError, naming the module, for arguments that ``ew.moe`` doesn't have.
    """
    where = path_of(module)
    strange = {
        f"{', '.join(others)} besides the router's choice": bool(others),
        "a norm after each expert (has_post_expert_norm)": module.has_post_expert_norm,
        f"tensors of rank {hidden_states.dim()}, {top_k_index.dim()} and {top_k_weights.dim()}, not 2": not (
            hidden_states.dim() == top_k_index.dim() == top_k_weights.dim() == 2
        ),
    }
    if features := [what for what, is_so in strange.items() if is_so]:
        raise UnsupportedModelError(
            f"{where}: its experts have {' and '.join(features)}, which ew.moe has no meaning for",
            hint="Experts are two products with an activation between them, for each token of a list.",
        )
    gated, transposed = bool(module.has_gate), bool(module.is_transposed)
    first, second = ("gate_up_proj" if gated else "up_proj"), "down_proj"
    gate_up, down = (_weight(getattr(module, name), transposed) for name in (first, second))
    gate_up_bias, down_bias = (getattr(module, f"{n}_bias") if module.has_bias else None for n in (first, second))

    interleaved, activation = _activation_of(module, down.shape[2])
    if interleaved:
        gate_up = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1)
        gate_up_bias = None if gate_up_bias is None else torch.cat([gate_up_bias[:, 0::2], gate_up_bias[:, 1::2]], 1)
    out: torch.Tensor = torch.ops.ew.moe(
        hidden_states,
        top_k_index,
        top_k_weights.to(hidden_states.dtype),
        gate_up,
        gate_up_bias,
        down,
        down_bias,
        *astuple(activation),
    )
    return out


def find_activation(function: Callable[[torch.Tensor], torch.Tensor], width: int, *, gated: bool) -> Activation | None:
    """Returns the known activation that has the same values as ``function``; None if there is none.

    The function maps [.., 2I] to [.., I] if ``gated``, where the first half are gates and the second half ups; else
    [.., I] to [.., I]. ``width`` is I.
    """

    def at(gate: float, up: float) -> float:
        row = torch.tensor([gate] * width + [up] * (width if gated else 0), dtype=torch.float64)
        return float(function(row[None])[0, 0])

    active = at(0.25, 1.0) - at(0.25, 0.0) if gated else at(0.25, 0.0)  # act(0.25), whatever is added to up
    if not 0.0 < active < 1e3:
        return None
    offset = _rounded(at(0.25, 0.0) / active) if gated else 0.0
    largest = at(0.25, 1e6) / active - offset if gated else 1e6
    limit = _rounded(largest) if largest < 0.99e6 else 0.0
    for kind, alpha in [(k, 1.0) for k in EXPERT_KINDS] + _steeper_silu(active):
        activation = Activation(kind, gated, alpha, limit, offset)
        if _same(function, activation, 2 * width if gated else width):
            return activation
    return None


def _steeper_silu(active: float) -> list[tuple[str, float]]:
    """Returns ("silu", alpha) for the alpha with 0.25 * sigmoid(0.25 * alpha) = ``active``, in a list; [] if there
    is none.
    """
    share = active / 0.25
    return [("silu", _rounded(math.log(share / (1 - share)) / 0.25))] if 0.5 < share < 1.0 else []


def _same(one: Callable[[torch.Tensor], torch.Tensor], other: Activation, width: int) -> bool:
    """Returns True if two functions agree at random points of several magnitudes."""
    generator = torch.Generator().manual_seed(0)
    for scale in (0.3, 3.0, 30.0):
        points = torch.randn(64, width, generator=generator, dtype=torch.float64) * scale
        expected, got = one(points), other(points)
        if expected.shape != got.shape or not torch.allclose(expected, got, rtol=_TOLERANCE, atol=_TOLERANCE):
            return False
    return True


def _activation_of(module: Any, width: int) -> tuple[bool, Activation]:
    """Returns the layout of a module's gate_up (True: gates and ups are interleaved) and its activation.

    Raises UnsupportedModelError if no activation of ``ew.moe`` computes the same.
    """
    function = module._apply_gate if module.has_gate else module.act_fn

    def taking_turns(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        result: torch.Tensor = function(torch.stack([gate, up], dim=-1).flatten(-2))
        return result

    # The model is being traced: evaluate with real tensors, out of sight of the tracer.
    with _disable_current_modes(), torch.no_grad():
        for interleaved in (False, True) if module.has_gate else (False,):
            activation = find_activation(taking_turns if interleaved else function, width, gated=bool(module.has_gate))
            if activation is not None:
                return interleaved, activation
    raise UnsupportedModelError(
        f"{path_of(module)}: the activation of its experts (_apply_gate, act_fn) is none that ew.moe has",
        hint=f"It has {', '.join(EXPERT_KINDS)}, of gates and ups side by side or interleaved, clamped or not.",
    )


def _weight(parameter: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Returns a parameter of experts with the shape [E, N, K]."""
    return parameter.transpose(1, 2) if transposed else parameter


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}") if abs(value) > 1e-9 else 0.0
