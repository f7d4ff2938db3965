"""A weight whose rows or columns are multiplied by numbers that a pass has computed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from enginewright.runtime.shared.errors import PassError

from .weights import InPlaceOf, WeightExpr


@dataclass(frozen=True)
class Factors:
    """Positive float32 numbers, of the weight's rank, broadcast over it. Equal if their bits are.

    Attributes:
        label: what they are, for ``describe``.
        values: for example [1, K] for the columns of a weight [N, K], [N, 1] for its rows.
    """

    label: str
    values: torch.Tensor = field(compare=False, repr=False)
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        content = self.values.contiguous().numpy().tobytes()
        object.__setattr__(self, "digest", hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class Scaled(InPlaceOf):
    """``base * factors``, or ``base / factors``; the base may have any type of floats, the result is float32."""

    factors: Factors
    divide: bool = False

    def __post_init__(self) -> None:
        shape = tuple(self.factors.values.shape)
        fits = len(shape) == len(self.base.shape) and all(
            a in (1, b) for a, b in zip(shape, self.base.shape, strict=True)
        )
        if not fits or not self.base.dtype.is_floating_point:
            raise PassError(f"factors {shape} for a weight {self.base.dtype} {self.base.shape}")

    def evaluate(self) -> torch.Tensor:
        value, factors = self.base.evaluate().float(), self.factors.values
        return value / factors if self.divide else value * factors

    def describe(self) -> str:
        return f"{self.base.describe()} {'/' if self.divide else '*'} {self.factors.label}"

    def member(self, index: int, base: WeightExpr) -> Scaled:
        """The same of one index of the first axis, which stays; ``base`` is the base's."""
        values = self.factors.values
        one = values if values.shape[0] == 1 else values[index : index + 1]
        return Scaled(base, Factors(f"{self.factors.label}[{index}]", one), self.divide)
