"""Weights with adapters merged into them, when they are read: W + w1 (f1(W) - W) + w2 (f2(W) - W) + ...

f is what one adapter makes of a weight, w its weight. A low-rank adapter (LoRA, arXiv 2106.09685) gives W + s B A, one
with magnitudes (DoRA, arXiv 2402.09353) m (W + s B A) / |W + s B A|, and others give rows or the whole anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from .weights import InPlaceOf, WeightExpr


@dataclass(frozen=True)
class Step(ABC):
    """One thing that an adapter does to a weight."""

    @abstractmethod
    def apply(self, value: torch.Tensor) -> torch.Tensor:
        """The weight after it, float32; ``value``, float32 of the same shape, is never written to."""


@dataclass(frozen=True)
class LowRank(Step):
    """Adds scale * B A to a weight [N, K], or to each expert's of [E, N, K].

    Attributes:
        a: [R, K]; of experts [E * R, K], one expert's rows after the other's.
        b: [N, R]; of experts [N, R * E], an expert's columns E apart.
        scale: factor of the product.
        transposed: the weight is [K, N], or [E, K, N]: of a table of tokens, and of the class Conv1D.
        experts: E; 0 for a matrix.
        magnitude: [N], the norms that rows have afterwards (DoRA); None leaves them.
    """

    a: WeightExpr
    b: WeightExpr
    scale: float
    transposed: bool = False
    experts: int = 0
    magnitude: WeightExpr | None = None

    def apply(self, value: torch.Tensor) -> torch.Tensor:
        adapted = self.added(value, 1.0)
        if self.magnitude is None:
            return adapted
        axis = 0 if self.transposed else 1
        factors = self.magnitude.evaluate().float() / torch.linalg.norm(adapted, dim=axis)
        return adapted.mul_(factors.unsqueeze(axis))

    def added(self, value: torch.Tensor, weight: float) -> torch.Tensor:
        """``value`` plus the product, times ``weight``. Takes the memory of the result, and of the factors."""
        left, right = self._factors()
        add = torch.baddbmm if self.experts else torch.addmm
        return add(value, left, right, alpha=self.scale * weight)

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.a.evaluate().float(), self.b.evaluate().float()
        if self.experts:
            a = a.reshape(self.experts, -1, a.shape[-1])  # [E, R, K]
            b = b.reshape(b.shape[0], -1, self.experts).permute(2, 0, 1)  # [E, N, R]
        return (a.mT, b.mT) if self.transposed else (b, a)


@dataclass(frozen=True)
class Added(Step):
    """Adds a vector, times ``scale``, to one of the same size."""

    values: WeightExpr
    scale: float

    def apply(self, value: torch.Tensor) -> torch.Tensor:
        return torch.add(value, self.values.evaluate().float(), alpha=self.scale)


@dataclass(frozen=True)
class Replaced(Step):
    """Takes a tensor of the same shape in place of the weight."""

    values: WeightExpr

    def apply(self, value: torch.Tensor) -> torch.Tensor:
        return self.values.evaluate().float()


@dataclass(frozen=True)
class ReplacedRows(Step):
    """Takes ``values`` [n, K] in place of the rows ``indices`` of a weight [N, K]."""

    values: WeightExpr
    indices: tuple[int, ...]

    def apply(self, value: torch.Tensor) -> torch.Tensor:
        return value.index_copy(0, torch.tensor(self.indices), self.values.evaluate().float())


@dataclass(frozen=True)
class Change:
    """All that one adapter does to a weight.

    Attributes:
        adapter: the folder's path, which tells adapters with tensors of the same names apart.
        weight: factor of the difference that the steps make.
        steps: at least one step, in order.
    """

    adapter: str
    weight: float
    steps: tuple[Step, ...]

    def merged(self, base: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``value`` plus the difference that the steps make to ``base``, times the weight."""
        first = self.steps[0]
        if len(self.steps) == 1 and isinstance(first, LowRank) and first.magnitude is None:
            return first.added(value, self.weight)
        adapted = base
        for step in self.steps:
            adapted = step.apply(adapted)
        if value is base and self.weight == 1:
            return adapted
        return torch.add(value, adapted - base, alpha=self.weight)


@dataclass(frozen=True)
class Adapted(InPlaceOf):
    """A float32 weight with adapters merged into it. Rows are of what those of ``base`` are."""

    changes: tuple[Change, ...]

    def evaluate(self) -> torch.Tensor:
        base = self.base.evaluate()
        value = base
        for change in self.changes:
            value = change.merged(base, value)
        return value

    def describe(self) -> str:
        names = ", ".join(f"{change.weight:g} * {change.adapter.rpartition('/')[2]}" for change in self.changes)
        return f"adapted({self.base.describe()}, {names})"
