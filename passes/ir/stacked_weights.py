"""Weight expressions with three or more dimensions, such as the stacked weights of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from enginewright.runtime.shared.errors import PassError

from .provenance import Part
from .scaled import Scaled
from .weights import Cast, Concat, Rearranged, Shape, Slice, WeightExpr


@dataclass(frozen=True)
class Stack(WeightExpr):
    """The bases, all of one shape and dtype, stacked along a new axis ``dim``."""

    bases: tuple[WeightExpr, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        first = self.bases[0]
        for base in self.bases[1:]:
            if base.shape != first.shape or base.dtype != first.dtype:
                raise PassError(f"can't stack {base.dtype} {base.shape} with {first.dtype} {first.shape}")

    @property
    def shape(self) -> Shape:
        inner = self.bases[0].shape
        return (*inner[: self.dim], len(self.bases), *inner[self.dim :])

    @property
    def dtype(self) -> torch.dtype:
        return self.bases[0].dtype

    def evaluate(self) -> torch.Tensor:
        # One base is in memory beside the result, whatever their number.
        out = torch.empty(self.shape, dtype=self.dtype)
        for i, base in enumerate(self.bases):
            out.select(self.dim, i).copy_(base.evaluate())
        return out

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        """Returns the origins of the indices along ``axis``. Along the new axis, they are those of all rows of each
        base.
        """
        inner = 0 if axis == self.dim else axis - (axis > self.dim)
        return tuple(part for base in self.bases for part in base.parts(inner))

    def describe(self) -> str:
        return f"stack({', '.join(b.describe() for b in self.bases)}, {self.dim})"


@dataclass(frozen=True)
class SwapAxes(Rearranged):
    """The base with the axes ``first`` and ``second`` exchanged; for a matrix, use ``Transpose``."""

    first: int
    second: int

    def __post_init__(self) -> None:
        rank = len(self.base.shape)
        if not (0 <= self.first < self.second < rank):
            raise PassError(f"axes {self.first} and {self.second} of a weight of shape {self.base.shape}")

    def axis_of_base(self, axis: int) -> int:
        """Returns the axis of the base that is ``axis`` after the exchange."""
        return {self.first: self.second, self.second: self.first}.get(axis, axis)

    @property
    def shape(self) -> Shape:
        return tuple(self.base.shape[self.axis_of_base(i)] for i in range(len(self.base.shape)))

    def evaluate(self) -> torch.Tensor:
        return self.base.evaluate().transpose(self.first, self.second)

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        return self.base.parts(self.axis_of_base(axis))

    def describe(self) -> str:
        return f"swap_axes({self.base.describe()}, {self.first}, {self.second})"


@dataclass(frozen=True)
class Unflatten(Rearranged):
    """The base [N * D, K] as [N, D, K]: the rows of ``count`` = N heads on an axis of their own."""

    count: int

    def __post_init__(self) -> None:
        if len(self.base.shape) != 2 or self.base.shape[0] % self.count:
            raise PassError(f"{self.count} equal parts of a weight of shape {self.base.shape}")

    @property
    def shape(self) -> Shape:
        rows, columns = self.base.shape
        return (self.count, rows // self.count, columns)

    def evaluate(self) -> torch.Tensor:
        return self.base.evaluate().reshape(self.shape)

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        """Returns the origins of the indices along ``axis``. The first two axes have those of all the base's rows."""
        return self.base.parts(1 if axis == 2 else 0)

    def describe(self) -> str:
        return f"unflatten({self.base.describe()}, {self.count})"


def is_of_heads(expr: WeightExpr) -> bool:
    """Returns True if a weight [N, M, K] is a matrix whose rows are divided into N heads; M and K may be exchanged."""
    return isinstance(expr.base if isinstance(expr, SwapAxes) else expr, Unflatten)


def pieces(expr: WeightExpr) -> tuple[WeightExpr, ...]:
    """Returns expressions whose concatenation along the first axis is ``expr``, so that they can be evaluated one by
    one.

    They are the members of a stack, such as experts; memory then needn't hold all of them. Another weight is one piece.
    """
    if len(expr.shape) < 3 or not _is_stacked(expr):
        return (expr,)
    return tuple(_member(expr, i) for i in range(expr.shape[0]))


def _is_stacked(expr: WeightExpr) -> bool:
    match expr:
        case Stack():
            return expr.dim == 0
        case Concat():
            return expr.dim != 0 and all(_is_stacked(b) for b in expr.bases)
        case Slice():
            return expr.dim != 0 and _is_stacked(expr.base)
        case SwapAxes():
            return expr.first != 0 and _is_stacked(expr.base)
        case Cast() | Scaled():
            return _is_stacked(expr.base)
        case _:
            return False


def _member(expr: WeightExpr, index: int) -> WeightExpr:
    """Returns the expression of one index of the first axis. The axis stays, with size 1."""
    match expr:
        case Stack():
            return Stack((expr.bases[index],))
        case Concat():
            return Concat(tuple(_member(b, index) for b in expr.bases), expr.dim)
        case Slice():
            return Slice(_member(expr.base, index), expr.dim, expr.start, expr.stop)
        case SwapAxes():
            return SwapAxes(_member(expr.base, index), expr.first, expr.second)
        case Cast():
            return Cast(_member(expr.base, index), expr.to)
        case Scaled():
            return expr.member(index, _member(expr.base, index))
        case _:
            raise PassError(f"{expr.describe()} isn't a stack")
