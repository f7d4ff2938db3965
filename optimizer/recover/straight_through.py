"""Straight-through gradients: what is rounded going forward passes its gradient on as if it weren't.

Bengio et al. 2013, https://arxiv.org/abs/1308.3432.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from enginewright.passes.ir.prequantized import CodeFormat, Codes, decode

_ROUNDING = 1.001
"""A value half a step from its integer isn't saturated, whatever float16 makes of the step."""


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: torch.Tensor, rounded: torch.Tensor, beyond: torch.Tensor | None) -> torch.Tensor:
        ctx.beyond = beyond
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        if ctx.beyond is not None:
            gradient = torch.where(gradient * ctx.beyond < 0, 0.0, gradient)
        return gradient, None, None


def straight_through(exact: torch.Tensor, rounded: torch.Tensor, beyond: torch.Tensor | None = None) -> torch.Tensor:
    """``rounded``, whose gradient goes to ``exact``, of the same shape.

    Args:
        beyond: int8, 1 for values that lie above all that can be rounded to, -1 for those below, else 0. A gradient
            that would move such a value farther out is cut off; one that brings it back isn't.
    """
    apply: Any = _StraightThrough.apply  # torch says what it takes from 2.14 on
    result: torch.Tensor = apply(exact, rounded, beyond)
    return result


@dataclass(frozen=True)
class RoundedWeight:
    """A weight as an exporter would store it now.

    Attributes:
        codes: its integers, scales and offsets.
        value: what they stand for, float32.
        beyond: see ``straight_through``; None if no value is.
    """

    codes: Codes
    value: torch.Tensor
    beyond: torch.Tensor | None

    @staticmethod
    def from_codes(weight: torch.Tensor, codes: Codes, code_format: CodeFormat) -> RoundedWeight:
        """``weight`` [.., N, K] float32 is what ``codes`` were made of."""
        value = decode(codes, code_format)
        width = code_format.group_size or weight.shape[-1]
        steps = codes.scales.float().abs() * (_ROUNDING / 2)
        # A group that has vanished isn't a range that its values are beyond: any gradient may bring it back.
        steps = torch.where(steps == 0, torch.inf, steps).repeat_interleave(width, dim=-1)[..., : weight.shape[-1]]
        off = weight - value
        beyond = (off > steps).to(torch.int8) - (off < -steps).to(torch.int8)
        return RoundedWeight(codes, value, beyond if bool(beyond.any()) else None)
