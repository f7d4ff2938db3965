"""Weights with some of the rows or columns of another: those that remain after pruning.

The remaining columns may compensate for the removed ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

import torch

from enginewright.runtime.shared.errors import CapacityError, PassError

from .provenance import Part
from .weights import Rearranged, Shape, WeightExpr


@dataclass(frozen=True)
class Chosen(Rearranged):
    """The elements of ``base`` at ``indices`` of the dimension ``dim``, in this order. No index occurs twice."""

    dim: int
    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        size = self.base.shape[self.dim]
        if not self.indices or len(set(self.indices)) < len(self.indices):
            raise PassError(f"no index, or one twice, is chosen of axis {self.dim} of {self.base.shape}")
        if not all(0 <= i < size for i in self.indices):
            raise PassError(f"an index beyond axis {self.dim} of {self.base.shape} is chosen")

    @property
    def shape(self) -> Shape:
        return (*self.base.shape[: self.dim], len(self.indices), *self.base.shape[self.dim + 1 :])

    def evaluate(self) -> torch.Tensor:
        return self.base.evaluate().index_select(self.dim, torch.tensor(self.indices))

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        """Returns the origins along ``axis``; consecutive indices of a source tensor are one part."""
        parts = self.base.parts(axis)
        if axis != self.dim or sum(p.size for p in parts) != self.base.shape[axis]:
            return parts
        return tuple(_joined(_at(parts, self.indices)))

    def describe(self) -> str:
        return f"kept({self.base.describe()}, {self.dim}, {_text(self.indices)})"


@dataclass(frozen=True)
class Mix:
    """A float32 matrix [removed, kept]: the factors by which each removed column is added to each kept column.

    Two matrices are equal if their bits are. ``file`` has the numbers; None if they are in memory.
    """

    digest: str
    shape: tuple[int, int]
    file: Path | None = field(compare=False)
    _values: torch.Tensor | None = field(compare=False, repr=False)

    @staticmethod
    def of(values: torch.Tensor, file: Path | None = None) -> Mix:
        """Returns a matrix whose numbers are stored in ``file``, or in memory if it is None. Raises CapacityError if
        the file can't be written.
        """
        content = values.contiguous().numpy()
        digest = hashlib.sha256(content.data).hexdigest()
        if file is not None:
            try:
                content.tofile(file)
            except OSError as e:
                raise CapacityError(f"{file} can't be written: {e}", hint="Free space on that disk.") from e
        rows, columns = values.shape
        return Mix(digest, (rows, columns), file, values if file is None else None)

    @property
    def values(self) -> torch.Tensor:
        """The matrix [removed, kept]."""
        if self._values is not None:
            return self._values
        count = self.shape[0] * self.shape[1]
        return torch.from_file(str(self.file), size=count, dtype=torch.float32).view(self.shape)


@dataclass(frozen=True)
class MixedColumns(WeightExpr):
    """``base[:, kept] + base[:, removed] @ mix``, [N, kept] float32, for a base [N, K] of any float type.

    The kept columns compensate for the removed ones, which works because a product's inputs are correlated. A column
    has the provenance of the kept column.
    """

    base: WeightExpr
    kept: tuple[int, ...]
    mix: Mix

    def __post_init__(self) -> None:
        removed = self.base.shape[1] - len(set(self.kept)) if len(self.base.shape) == 2 else -1
        if self.mix.shape != (removed, len(self.kept)) or not self.base.dtype.is_floating_point:
            raise PassError(f"a mix {self.mix.shape} for {len(self.kept)} columns of {self.base.dtype} {self.shape}")

    @property
    def shape(self) -> Shape:
        return (self.base.shape[0], len(self.kept))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def evaluate(self) -> torch.Tensor:
        base, columns = self.base.evaluate().float(), torch.tensor(self.kept)
        removed = others(self.kept, base.shape[1])
        return base[:, columns].addmm_(base[:, removed], self.mix.values)

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        return Chosen(self.base, 1, self.kept).parts(axis)

    def describe(self) -> str:
        return f"mixed({self.base.describe()}, {_text(self.kept)}, {self.mix.digest[:8]})"


def others(kept: Sequence[int], size: int) -> torch.Tensor:
    """Returns the indices from 0 to ``size - 1`` that are not in ``kept``, in ascending order."""
    left = torch.ones(size, dtype=torch.bool)
    left[list(kept)] = False
    return left.nonzero()[:, 0]


def _at(parts: Sequence[Part], indices: Sequence[int]) -> Iterator[Part]:
    """Yields the part of each index, followed by the parts that are mixed into it.

    ``parts`` are the parts of a weight along one axis, ``indices`` indices of that axis.
    """
    owner: list[tuple[int, int]] = []  # part and place within it, for each index
    for number, part in enumerate(parts):
        owner += [(number, i) for i in range(part.size)]
    for index in indices:
        number, place = owner[index]
        part = parts[number]
        if part.mixed is None:
            yield Part(part.source, part.start + place, part.start + place + 1, part.axis)
            continue
        yield replace(part, mixed=1)
        yield from takewhile(lambda p: p.mixed == 0, parts[number + 1 :])


def _joined(parts: Iterator[Part]) -> Iterator[Part]:
    last: Part | None = None
    for part in parts:
        follows = last is not None and (last.source, last.axis, last.stop) == (part.source, part.axis, part.start)
        if last is not None and follows and last.mixed is part.mixed is None:
            last = replace(last, stop=part.stop)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last


def _text(indices: Sequence[int]) -> str:
    """Returns up to 8 indices as text; for more, their count and a digest."""
    if len(indices) <= 8:
        return ",".join(map(str, indices))
    return f"{len(indices)} of them, {hashlib.sha256(repr(tuple(indices)).encode()).hexdigest()[:8]}"
