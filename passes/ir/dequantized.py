"""A quantized weight's dequantized floats, lazily."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .provenance import Part
from .weights import Shape, WeightExpr


@dataclass(frozen=True)
class Dequantized(WeightExpr):
    """``values * scales + offsets`` in float32, with the shape of the values.

    Attributes:
        values: [.., N, K], integers or 8-bit floats.
        scales: [.., N, ceil(K/G)].
        offsets: of the shape of the scales; None without offsets.
        group_size: G; 0 if all of K is one group.
    """

    values: WeightExpr
    scales: WeightExpr
    offsets: WeightExpr | None
    group_size: int

    @property
    def shape(self) -> Shape:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def evaluate(self) -> torch.Tensor:
        size = self.shape[-1]
        floats = self.values.evaluate().float()  # first: it leaves the others what they are to give
        floats *= self._spread(self.scales, size)
        if self.offsets is not None:
            floats += self._spread(self.offsets, size)
        return floats

    def _spread(self, factors: WeightExpr, size: int) -> torch.Tensor:
        return factors.evaluate().float().repeat_interleave(self.group_size or size, -1)[..., :size]

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        return self.values.parts(axis)

    def describe(self) -> str:
        return f"floats({self.values.describe()})"
