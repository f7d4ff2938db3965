"""How far one program's logits are from another's."""

from __future__ import annotations

import torch

_ELEMENTS = 1 << 22
"""Logits that are looked at together."""


def mean_kl(reference: torch.Tensor, logits: torch.Tensor) -> float:
    """KL(reference || logits) per row in nats; [R, V] both."""
    total = 0.0
    step = max(1, _ELEMENTS // reference.shape[-1])
    for a, b in zip(reference.split(step), logits.split(step), strict=True):
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        total += float((p.exp() * (p - q)).sum(-1, dtype=torch.float64).clamp(min=0).sum())
    return total / len(reference)
