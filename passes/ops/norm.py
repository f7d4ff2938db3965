"""``ew.rms_norm``, ``ew.layer_norm`` and their forms that add the residual first. All over the last dimension.

RMSNorm: Zhang and Sennrich, https://arxiv.org/abs/1910.07467. LayerNorm: Ba et al., https://arxiv.org/abs/1607.06450.
"""

from __future__ import annotations

import torch

from .library import accumulate_dtype, register


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x [.., C], weight [C] -> [.., C]: x * rsqrt(mean(x^2) + eps) * weight."""
    wide = x.to(accumulate_dtype(x))
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (normed if weight is None else normed * weight).contiguous()


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x [.., C], weight [C], bias [C] -> [.., C]: (x - mean) / sqrt(variance + eps) * weight + bias."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps).contiguous()


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds, then normalizes: x, residual [.., C] -> (rms_norm(sum), sum), where sum = x + residual."""
    total = (x + residual).contiguous()
    return rms_norm(total, weight, eps), total


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds, then normalizes: x, residual [.., C] -> (layer_norm(sum), sum), where sum = x + residual."""
    total = (x + residual).contiguous()
    return layer_norm(total, weight, bias, eps), total


def _fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _add_fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


register(rms_norm, fake=_fake)
register(layer_norm, fake=_fake)
register(add_rms_norm, fake=_add_fake)
register(add_layer_norm, fake=_add_fake)
