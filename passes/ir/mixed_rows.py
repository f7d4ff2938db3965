"""Weights whose rows or columns are linear combinations of another weight's, with small matrices that a pass has
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from enginewright.runtime.shared.errors import PassError

from .kept import keep
from .provenance import Part
from .weights import Shape, Slice, WeightExpr

Indices = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Mix:
    """Linear combinations in J blocks: block j computes N rows from the M rows ``indices[j]`` of a base.

    Two are equal if their bits are.

    Attributes:
        indices: [J][M], indices of the base.
        size: N.
        digest: the digest of the matrices.
        read: returns the matrices, [J, N, M] float32.
    """

    indices: Indices
    size: int
    digest: str
    read: Callable[[], torch.Tensor] = field(compare=False, repr=False)

    @staticmethod
    def of(indices: Sequence[Sequence[int]], matrices: torch.Tensor, file: Path | None = None) -> Mix:
        """Returns the combinations, with the matrices stored in ``file``, which is read each time that they are needed.

        Args:
            indices: [J][M], indices of the base.
            matrices: [J, N, M]; they are rounded to float32.
            file: the file to write; None stores the matrices in memory.

        Raises:
            PassError: the shapes don't match, or a number isn't finite.
            CapacityError: the file can't be written.
        """
        floats = matrices.float()
        chosen = tuple(tuple(int(i) for i in block) for block in indices)
        if len(chosen) != floats.shape[0] or {len(block) for block in chosen} != {floats.shape[2]}:
            raise PassError(f"matrices {tuple(floats.shape)} for {len(chosen)} blocks of {len(chosen[0])} indices")
        if not torch.isfinite(floats).all():
            raise PassError("a mix of rows has numbers that are not finite")
        digest, read = keep([floats], file)
        return Mix(chosen, floats.shape[1], digest, lambda: read()[0])


@dataclass(frozen=True)
class MixedRows(WeightExpr):
    """A weight of linear combinations of the rows of ``base``, or of its indices along another ``axis``.

    Index ``j * N + n`` is the sum over m of ``matrices[j, n, m]`` times index ``indices[j][m]`` of the base, with the
    matrices and indices of ``mix``. The base may have any float type. Sums are computed in float64, so that their order
    doesn't change the result, which is float32.
    """

    base: WeightExpr
    mix: Mix
    axis: int = 0

    def __post_init__(self) -> None:
        most = self.base.shape[self.axis]
        if not self.base.dtype.is_floating_point or any(not 0 <= i < most for block in self.mix.indices for i in block):
            raise PassError(f"rows of {most} to be mixed of a weight {self.base.dtype} {self.base.shape}")

    @property
    def shape(self) -> Shape:
        size = len(self.mix.indices) * self.mix.size
        return (*self.base.shape[: self.axis], size, *self.base.shape[self.axis + 1 :])

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def evaluate(self) -> torch.Tensor:
        rows = self.base.evaluate().movedim(self.axis, 0).flatten(1) if len(self.base.shape) > 1 else None
        rows = self.base.evaluate()[:, None] if rows is None else rows  # [R, C]
        matrices = self.mix.read()
        blocks = [m.double() @ rows[list(i)].double() for m, i in zip(matrices, self.mix.indices, strict=True)]
        mixed = torch.cat(blocks).float()  # [J * N, C]
        rest = (*self.base.shape[: self.axis], *self.base.shape[self.axis + 1 :])
        return mixed.view(-1, *rest).movedim(0, self.axis)

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        """Returns the origins of the indices along ``axis``. Those of a block are all indices of the base that are
        combined in it.
        """
        if axis != self.axis:
            return self.base.parts(axis)
        parts: list[Part] = []
        for block in self.mix.indices:
            first = True
            for start, stop in _runs(block):
                for part in Slice(self.base, axis, start, stop).parts(axis):
                    whole = first and part.mixed is None and part.size == self.mix.size == len(block)
                    mixed = None if whole else self.mix.size if first else 0
                    parts.append(Part(part.source, part.start, part.stop, part.axis, mixed))
                    first = False
        return _joined(parts)

    def describe(self) -> str:
        return f"mixed({self.base.describe()}, {self.axis}, {self.mix.digest[:8]})"


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Returns indices as ranges (start, stop), in ascending order."""
    ordered = sorted(set(indices))
    breaks = [i for i, (a, b) in enumerate(pairwise(ordered), 1) if b != a + 1]
    bounds = [0, *breaks, len(ordered)]
    return [(ordered[a], ordered[b - 1] + 1) for a, b in pairwise(bounds)]


def _joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Joins neighbouring parts with consecutive indices of the same source tensor."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        plain = part.mixed is None and last is not None and last.mixed is None
        if plain and last is not None and (last.source, last.stop, last.axis) == (part.source, part.start, part.axis):
            joined[-1] = Part(last.source, last.start, part.stop, last.axis)
        else:
            joined.append(part)
    return tuple(joined)
