"""Layouts of values: a value as a view of another, its base, with dimensions permuted and dimensions of size 1
added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.fx.node import Node

from enginewright.passes.framework.views import view_as

from ..ir.program import Program
from ..ir.provenance import WHERE

aten = torch.ops.aten


@dataclass(frozen=True)
class Laid:
    """A value as a view of ``base``: its dimension i is dimension ``dims[i]`` of the base, or a new one of size 1 if
    that is None.

    Every dimension of ``base`` appears once. [1, N, T, D] with a base [T, N, D] has dims (None, 1, 0, 2).
    """

    base: Node
    dims: tuple[int | None, ...]

    @property
    def real(self) -> list[int]:
        """The value's dimensions that exist in the base, in the value's order."""
        return [i for i, d in enumerate(self.dims) if d is not None]

    @property
    def order(self) -> list[int]:
        """The value's dimensions that exist in the base, in the base's order."""
        return sorted(self.real, key=lambda i: self._base(i))

    def _base(self, dim: int) -> int:
        base_dim = self.dims[dim]
        assert base_dim is not None
        return base_dim

    @property
    def rank(self) -> int:
        return len(self.dims)

    def last_is_last(self) -> bool:
        """Returns True if the last dimension of the value is the last dimension of the base."""
        return bool(self.dims) and self.dims[-1] is not None and self.dims[-1] == len(self.real) - 1


def as_it_is(program: Program, node: Node) -> Laid:
    """Returns the layout of a value that is its own base."""
    return Laid(node, tuple(range(program.value(node).dim())))


def arrange(program: Program, value: Laid, target: Sequence[int], rank: int, *, broadcast: bool) -> Node:
    """Adds calls that permute and unsqueeze a value's base, and returns the result with the dimensions ``target``, in
    order.

    Args:
        program: the program.
        value: the value.
        target: dimensions of a result of rank ``rank``; the value's dimensions are aligned with them on the right. They
            include all dimensions that exist in the base.
        rank: the rank of the result.
        broadcast: True leaves out leading dimensions of size 1, since broadcasting adds them again.
    """
    offset = rank - value.rank
    places = [value.dims[t - offset] if t >= offset else None for t in target]
    node, where = value.base, value.base.meta.get(WHERE) or ("",)
    node = permute(program, node, [p for p in places if p is not None], where)
    for i in range(len(places)) if not broadcast else range(_leading_nones(places), len(places)):
        if places[i] is None:
            node = program.call(
                aten.unsqueeze.default, node, i - (_leading_nones(places) if broadcast else 0), where=where
            )
    return node


def _leading_nones(places: Sequence[int | None]) -> int:
    return next((i for i, p in enumerate(places) if p is not None), len(places))


def materialize(program: Program, value: Laid) -> Node:
    """Adds calls that compute the value itself from its base, and returns the result."""
    return arrange(program, value, range(value.rank), value.rank, broadcast=False)


def permute(program: Program, node: Node, order: Sequence[int], where: tuple[str, ...]) -> Node:
    """Adds a call that permutes the dimensions of ``node``, and returns it: a transpose if two are exchanged.

    If the order doesn't change, it returns ``node``. ``where`` has the module paths of the new call.
    """
    moved = [i for i, d in enumerate(order) if i != d]
    if not moved:
        return node
    if len(moved) == 2:
        return program.call(aten.transpose.int, node, moved[0], moved[1], where=where)
    return program.call(aten.permute.default, node, list(order), where=where)


def reshape(program: Program, value: Laid, shape: Sequence[sympy.Expr], where: tuple[str, ...]) -> Laid | None:
    """Returns the layout of a value after a reshape; None if that needs two symbolic sizes.

    Leading sizes of 1 become dimensions that don't exist in the base. If dimensions are joined that aren't adjacent in
    the base, the base is first permuted to the value's order. ``where`` has the module paths of new calls.
    """
    leading = next((i for i, size in enumerate(shape[:-1]) if size != 1), max(len(shape) - 1, 0))
    if (regrouped := _regroup(program, value, shape, leading, where)) is not None:
        return regrouped
    natural = materialize(program, Laid(value.base, tuple(d for d in value.dims if d is not None)))
    return _regroup(program, as_it_is(program, natural), shape, leading, where)


def _regroup(
    program: Program, value: Laid, shape: Sequence[sympy.Expr], leading: int, where: tuple[str, ...]
) -> Laid | None:
    base_shape = program.shape(value.base)
    old = [d for d in value.dims if d is not None]  # base dimensions in the value's order
    groups = group_sizes([base_shape[d] for d in old], list(shape[leading:]))
    if groups is None:
        return None
    starts: dict[int, list[int]] = {}  # base dimension -> result dimensions that start there
    for ins, outs in groups:
        bases, outs = [old[i] for i in ins], [o + leading for o in outs]
        if [base_shape[b] for b in bases] == [shape[o] for o in outs]:
            starts.update({b: [o] for b, o in zip(bases, outs, strict=True)})
        elif bases == list(range(bases[0], bases[0] + len(bases))):
            starts[bases[0]] = outs
        else:
            return None
    order = [o for b in sorted(starts) for o in starts[b]]
    base = view_as(program, value.base, [shape[o] for o in order], where)
    if base is None:
        return None
    dims: list[int | None] = [None] * leading + [order.index(o) for o in range(leading, len(shape))]
    return Laid(base, tuple(dims))


def group_sizes(old: Sequence[sympy.Expr], new: Sequence[sympy.Expr]) -> list[tuple[list[int], list[int]]] | None:
    """Divides two shapes into the shortest runs of adjacent dimensions with equal products.

    Returns (indices of ``old``, indices of ``new``) for each run; None if the whole products differ or no division
    exists.
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        if i == len(old) or j == len(new):
            return None
        ins, outs, left, right = [i], [j], old[i], new[j]
        i, j = i + 1, j + 1
        while left != right:
            if sympy.denom(sympy.cancel(left / right)) == 1 and j < len(new):
                outs.append(j)
                right, j = right * new[j], j + 1
            elif i < len(old):
                ins.append(i)
                left, i = left * old[i], i + 1
            else:
                return None
        while i < len(old) and old[i] == 1:
            ins.append(i)
            i += 1
        while j < len(new) and new[j] == 1:
            outs.append(j)
            j += 1
        groups.append((ins, outs))
    return groups
