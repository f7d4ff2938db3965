"""Weights with merged adapters, lazily: W + w1 (f1(W) - W) + w2 (f2(W) - W) + ...

f(W) is the weight with one adapter, and w is the factor of that adapter. A low-rank adapter (LoRA, arXiv 2106.09685)
gives f(W) = W + s B A. One with magnitudes (DoRA, arXiv 2402.09353) gives m (W + s B A) / |W + s B A|. Others replace
rows or the whole weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from .weights import InPlaceOf, WeightExpr


@dataclass(frozen=True)
class Step(ABC):
    """One change that an adapter makes to a weight."""

    @abstractmethod
    def apply(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the changed weight. ``value`` is the weight before, float32 of the same shape, and isn't modified."""


@dataclass(frozen=True)
class LowRank(Step):
    """Adds scale * B A to a weight [N, K], or to each expert's weight in [E, N, K].

    Attributes:
        a: A, [R, K]. For experts [E * R, K]: the R rows of an expert are adjacent.
        b: B, [N, R]. For experts [N, R * E]: the columns of an expert are E apart.
        scale: the factor of the product.
        transposed: True if the weight is stored as [K, N] or [E, K, N], as token tables and the class Conv1D are.
        experts: E; 0 for a matrix.
        magnitude: [N], the norms that the rows get afterwards (DoRA); None for LoRA.
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
        """Returns ``value`` plus ``weight`` times scale * B A. It needs memory for the result and the factors only."""
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
    """Adds ``scale`` times a vector to a vector of the same size."""

    values: WeightExpr
    scale: float

    def apply(self, value: torch.Tensor) -> torch.Tensor:
        return torch.add(value, self.values.evaluate().float(), alpha=self.scale)


@dataclass(frozen=True)
class Replaced(Step):
    """Replaces the weight by a tensor of the same shape."""

    values: WeightExpr

    def apply(self, value: torch.Tensor) -> torch.Tensor:
        return self.values.evaluate().float()


@dataclass(frozen=True)
class ReplacedRows(Step):
    """Replaces the rows ``indices`` of a weight [N, K] by ``values`` [n, K]."""

    values: WeightExpr
    indices: tuple[int, ...]

    def apply(self, value: torch.Tensor) -> torch.Tensor:
        return value.index_copy(0, torch.tensor(self.indices), self.values.evaluate().float())


@dataclass(frozen=True)
class Change:
    """All changes that one adapter makes to a weight.

    Attributes:
        adapter: the path of the adapter's folder. It is part of the comparison, since tensors of two adapters may have
            the same names.
        weight: the factor of the difference that the steps make.
        steps: the changes in order, at least one.
    """

    adapter: str
    weight: float
    steps: tuple[Step, ...]

    def merged(self, base: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Returns ``value`` plus ``weight`` times the difference that the steps make to ``base``.

        ``base`` is the weight without adapters, ``value`` the weight with the adapters merged so far.
        """
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
    """A float32 weight with adapters merged into it. Its rows have the provenance of the rows of ``base``."""

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
