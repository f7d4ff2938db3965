"""``ew.gated_activation``: act(gate) * up, with gate and up side by side (Shazeer, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .library import register

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}
"""The kinds that ``gated_activation`` takes."""


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """Splits gate_up into gate and up, and computes kind(gate) * up: gate_up [.., 2I] -> [.., I].

    Raises ValueError for an unknown kind.
    """
    if kind not in ACTIVATIONS:
        raise ValueError(f"ew.gated_activation: unknown kind {kind!r}; there are {sorted(ACTIVATIONS)}")
    gate, up = gate_up.chunk(2, dim=-1)  # [.., I] each
    return (ACTIVATIONS[kind](gate) * up).contiguous()


def _fake(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    if kind not in ACTIVATIONS:
        raise ValueError(f"ew.gated_activation: unknown kind {kind!r}; there are {sorted(ACTIVATIONS)}")
    torch._check(gate_up.shape[-1] % 2 == 0, lambda: f"ew.gated_activation: odd width in {gate_up.shape}")
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


register(gated_activation, fake=_fake)
