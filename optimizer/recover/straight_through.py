"""Straight-through gradients: a rounded value passes its gradient on as if it weren't rounded.

Bengio et al. 2013, https://arxiv.org/abs/1308.3432.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from enginewright.passes.ir.prequantized import CodeFormat, Codes, decode

_ROUNDING = 1.001
"""The factor on the range of rounding, for comparisons that must allow for a scale's rounding to float16.

A value up to half a step beyond the last integer is within the range.
"""


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
    """Returns ``rounded``, whose gradient goes to ``exact`` of the same shape.

    Args:
        exact: the values before rounding.
        rounded: the values after rounding.
        beyond: int8, 1 for values above the range of rounding, -1 for values below it, 0 within; None if all are
            within. A gradient that would move a value farther out of the range is removed.
    """
    apply: Any = _StraightThrough.apply  # torch says what it takes from 2.14 on
    result: torch.Tensor = apply(exact, rounded, beyond)
    return result


@dataclass(frozen=True)
class RoundedWeight:
    """A weight in the form in which an export would store it.

    Attributes:
        codes: the integers, scales and offsets.
        value: their values, float32.
        beyond: see ``straight_through``; None if all values are within the range.
    """

    codes: Codes
    value: torch.Tensor
    beyond: torch.Tensor | None

    @staticmethod
    def from_codes(weight: torch.Tensor, codes: Codes, code_format: CodeFormat) -> RoundedWeight:
        """Returns the rounded form of a weight [.., N, K] float32 by its codes and their format."""
        value = decode(codes, code_format)
        width = code_format.group_size or weight.shape[-1]
        steps = codes.scales.float().abs() * (_ROUNDING / 2)
        # A group that has vanished isn't a range that its values are beyond: any gradient may bring it back.
        steps = torch.where(steps == 0, torch.inf, steps).repeat_interleave(width, dim=-1)[..., : weight.shape[-1]]
        off = weight - value
        beyond = (off > steps).to(torch.int8) - (off < -steps).to(torch.int8)
        return RoundedWeight(codes, value, beyond if bool(beyond.any()) else None)
