"""Weights whose rows or columns are multiplied by factors that a pass has computed, or by a rotation."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cache

import torch

from enginewright.runtime.shared.errors import PassError

from .weights import InPlaceOf, WeightExpr


@dataclass(frozen=True)
class Factors:
    """Positive float32 factors that broadcast over a weight. Two are equal if their bits are.

    Attributes:
        label: a name of the factors, for ``describe``.
        values: the factors, for example [1, K] for the columns of a weight [N, K], or [N, 1] for its rows.
        digest: the digest of their bits.
    """

    label: str
    values: torch.Tensor = field(compare=False, repr=False)
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        content = self.values.contiguous().numpy().tobytes()
        object.__setattr__(self, "digest", hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class Scaled(InPlaceOf):
    """``base * factors``, or ``base / factors`` with ``divide``. The base may have any float type; the result is
    float32.
    """

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
        """Returns this expression for one index of the first axis, such as an expert. The axis stays, with size 1.

        ``base`` is the expression of the base for that index.
        """
        values = self.factors.values
        one = values if values.shape[0] == 1 else values[index : index + 1]
        return Scaled(base, Factors(f"{self.factors.label}[{index}]", one), self.divide)


@dataclass(frozen=True)
class Rotated(InPlaceOf):
    """``base`` with a Hadamard rotation of indices ``start:stop`` of an axis, -1 or -2, in blocks of ``size`` indices.

    The matrix is its own inverse. The base may have any float type; the result is float32.
    """

    axis: int
    start: int
    stop: int
    size: int

    def __post_init__(self) -> None:
        whole = self.axis in (-1, -2) and 0 <= self.start < self.stop <= self.base.shape[self.axis]
        if not whole or (self.stop - self.start) % self.size or self.size & (self.size - 1):
            raise PassError(
                f"blocks of {self.size} of {self.start}:{self.stop} of axis {self.axis} of {self.base.shape}"
            )
        if not self.base.dtype.is_floating_point:
            raise PassError(f"a rotation of a weight of {self.base.dtype}")

    def evaluate(self) -> torch.Tensor:
        return rotated(self.base.evaluate().float(), self)

    def describe(self) -> str:
        return f"rotated({self.base.describe()}, {self.axis}, {self.start}:{self.stop}, {self.size})"


def rotated(value: torch.Tensor, how: Rotated) -> torch.Tensor:
    """Returns a copy of ``value`` with a Hadamard rotation. ``how`` has the axis, the range of indices and the block
    size.
    """
    value = value.transpose(how.axis, -1)
    turned = value[..., how.start : how.stop].unflatten(-1, (-1, how.size)).double() @ hadamard(how.size)
    parts = (value[..., : how.start], turned.float().flatten(-2), value[..., how.stop :])
    return torch.cat(parts, -1).transpose(how.axis, -1).contiguous()


@cache
def hadamard(size: int) -> torch.Tensor:
    """Returns the orthogonal Hadamard matrix [size, size] float64 of a power of two (Sylvester's construction)."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.div(matrix, size**0.5)
