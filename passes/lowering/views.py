"""Strided views with affine sizes, and the effects of view-like ops on them. Nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from enginewright.runtime.shared.dtypes import Dtype
from enginewright.runtime.shared.lowered_program import Affine, Operand

Sizes = tuple[Affine, ...]
ONE = Affine(1)


@dataclass(frozen=True)
class View:
    """An ``Operand`` under construction: a strided part of a buffer, weight or step input. Strides and offset count
    elements.
    """

    kind: Literal["buffer", "weight", "input"]
    name: str
    dtype: Dtype
    shape: Sizes
    strides: Sizes
    offset: Affine = field(default_factory=Affine)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def has_unit_inner_stride(self) -> bool:
        return self.rank > 0 and (self.strides[-1] == 1 or self.shape[-1] == 1)

    @property
    def is_contiguous(self) -> bool:
        dense = contiguous_strides(self.shape)
        return all(n == 1 or s == d for n, s, d in zip(self.shape, self.strides, dense, strict=True))

    def operand(self) -> Operand:
        # A stride over a single element is never stepped; 1 is what a kernel for unit inner strides expects to see.
        strides = self.strides
        if self.rank and self.shape[-1] == 1:
            strides = (*strides[:-1], ONE)
        return Operand(
            kind=self.kind,
            name=self.name,
            dtype=self.dtype,
            shape=self.shape,
            strides=strides,
            offset=self.offset,
        )


def elements(shape: Sequence[Affine]) -> Affine:
    """Returns the number of elements of a shape. Raises ValueError if it isn't affine, such as T * T."""
    total = ONE
    for size in shape:
        total = total * size
    return total


def contiguous_strides(shape: Sizes) -> Sizes:
    """Returns row-major strides. Raises ValueError if one isn't affine."""
    strides: list[Affine] = []
    step = ONE
    for position, size in enumerate(reversed(shape)):
        strides.append(step)
        if position + 1 < len(shape):
            step = step * size
    return tuple(reversed(strides))


def reshape(view: View, shape: Sizes) -> View | None:
    """Returns a view of the same elements with another shape, or None if strides can't express it.

    The rule is PyTorch's (ATen/TensorUtils.cpp, computeStride). Adjacent dimensions without gaps between them form a
    chunk. Each chunk is divided into the new dimensions, from the last to the first.
    """
    if shape == view.shape:
        return view
    if not view.rank:
        return replace(view, shape=shape, strides=(ONE,) * len(shape)) if all(s == 1 for s in shape) else None
    try:
        strides = _divide_chunks(view, shape)
    except ValueError:
        return None
    return None if strides is None else replace(view, shape=shape, strides=strides)


def _divide_chunks(view: View, shape: Sizes) -> Sizes | None:
    strides: list[Affine] = [ONE] * len(shape)
    to = len(shape) - 1
    base, old, new = view.strides[-1], ONE, ONE
    for d in reversed(range(view.rank)):
        old = old * view.shape[d]
        if d > 0 and (view.shape[d - 1] == 1 or view.strides[d - 1] == old * base):
            continue
        while to >= 0 and (new != old or shape[to] == 1):
            strides[to] = new * base
            new = new * shape[to]
            to -= 1
        if new != old:
            return None
        if d > 0:
            base, old, new = view.strides[d - 1], ONE, ONE
    return tuple(strides) if to < 0 else None


def slice_view(view: View, dim: int, start: Affine, size: Affine, step: int = 1) -> View:
    """Returns a view of ``size`` elements along ``dim``, from ``start`` on, ``step`` apart.

    Raises ValueError if the offset isn't affine.
    """
    shape, strides = list(view.shape), list(view.strides)
    offset = view.offset + start * strides[dim]
    shape[dim], strides[dim] = size, strides[dim] * step
    return replace(view, shape=tuple(shape), strides=tuple(strides), offset=offset)


def select(view: View, dim: int, index: Affine) -> View:
    """Returns a view of index ``index`` along ``dim``, without that dimension. Raises ValueError if the offset isn't
    affine.
    """
    sliced = slice_view(view, dim, index, ONE)
    return replace(
        sliced,
        shape=sliced.shape[:dim] + sliced.shape[dim + 1 :],
        strides=sliced.strides[:dim] + sliced.strides[dim + 1 :],
    )


def permute(view: View, order: Sequence[int]) -> View:
    return replace(view, shape=tuple(view.shape[i] for i in order), strides=tuple(view.strides[i] for i in order))


def expand(view: View, shape: Sizes) -> View:
    """Returns a view that is broadcast to ``shape`` as in torch. The stride of repeated and of new leading dimensions
    is 0.
    """
    missing = len(shape) - view.rank
    strides = [Affine()] * missing
    for have, stride, want in zip(view.shape, view.strides, shape[missing:], strict=True):
        strides.append(Affine() if have == 1 and want != 1 else stride)
    return replace(view, shape=shape, strides=tuple(strides))


def collapse(views: Sequence[View], rank: int) -> list[View] | None:
    """Returns the views, which have one shape, with adjacent dimensions merged until ``rank`` remain; None if that is
    impossible.
    """
    result = list(views)
    while result[0].rank > rank:
        merged = next((m for i in range(result[0].rank - 1) if (m := _merge(result, i)) is not None), None)
        if merged is None:
            return None
        result = merged
    return result


def _merge(views: Sequence[View], dim: int) -> list[View] | None:
    """Returns the views with the dimensions ``dim`` and ``dim + 1`` merged; None if that is impossible for one of
    them.
    """
    merged = []
    for view in views:
        outer, inner = view.shape[dim], view.shape[dim + 1]
        try:
            size = outer * inner
            dense = view.strides[dim] == view.strides[dim + 1] * inner
        except ValueError:
            return None
        if outer == 1:
            stride = view.strides[dim + 1]
        elif inner == 1:
            stride = view.strides[dim]
        elif dense:
            stride = view.strides[dim + 1]
        else:
            return None
        merged.append(
            replace(
                view,
                shape=(*view.shape[:dim], size, *view.shape[dim + 2 :]),
                strides=(*view.strides[:dim], stride, *view.strides[dim + 2 :]),
            )
        )
    return merged
