"""Epilogues of linears: an activation of the sums before they are stored, then the sum with a residual."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .activation import ACTIVATIONS

LINEAR_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **ACTIVATIONS,
    "relu2": lambda x: torch.relu(x).square(),
    "tanh": torch.tanh,
}
"""The kinds that linears take, besides "" for none; relu2 is the square of relu."""


def finish_linear(total: torch.Tensor, activation: str = "", residual: torch.Tensor | None = None) -> torch.Tensor:
    """total [.., N], a product with its bias -> [.., N]: activation(total) + residual [.., N]."""
    if activation:
        total = LINEAR_ACTIVATIONS[activation](total)
    return total if residual is None else total + residual


def check_epilogue(op: str, y: torch.Tensor, activation: str, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Returns ``y``, a fake result. Raises for an unknown activation, or for a residual of another shape or type."""
    if activation and activation not in LINEAR_ACTIVATIONS:
        raise ValueError(f"ew.{op}: unknown activation {activation!r}; there are {sorted(LINEAR_ACTIVATIONS)}")
    if residual is not None:
        torch._check(
            residual.dim() == y.dim() and residual.dtype == y.dtype,
            lambda: f"ew.{op}: a residual {residual.dtype} {residual.shape} for a result {y.dtype} {y.shape}",
        )
        for mine, its in zip(y.shape, residual.shape, strict=True):
            torch._check(mine == its, lambda: f"ew.{op}: a residual {residual.shape} for a result {y.shape}")
    return y
