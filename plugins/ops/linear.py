"""``ew.linear``: a product with a weight, plus a bias."""

from __future__ import annotations

import torch

from .library import register


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [.., K], weight [N, K], bias [N] -> [.., N]: x @ weight.T + bias."""
    return torch.nn.functional.linear(x, weight, bias).contiguous()


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    torch._check(
        x.shape[-1] == weight.shape[1], lambda: f"ew.linear: x {x.shape} and weight {weight.shape} differ in K"
    )
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


register("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", reference=linear, fake=_fake)
