"""Reads and builds views for passes: sizes as expressions, and the bounds of slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx.node import Node

from enginewright.passes.ir.program import Program

aten = torch.ops.aten

RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
"""The ops whose second argument is the new shape."""


def size_arguments(shape: Sequence[sympy.Expr]) -> list[int] | None:
    """Returns ``shape`` as arguments of a view: numbers, and -1 for the one symbolic size. None if several are
    symbolic.

    Sizes written this way need no ``sym_size`` nodes.
    """
    if sum(not s.is_Integer for s in shape) > 1:
        return None
    return [int(s) if s.is_Integer else -1 for s in shape]


def view_as(program: Program, x: Node, shape: Sequence[sympy.Expr], where: tuple[str, ...]) -> Node | None:
    """Adds calls that give ``x`` another shape, and returns the result.

    It is a view if the strides of ``x`` allow one, otherwise a view of a copy. It is ``x`` itself if the shape is the
    same, and None if more than one size is symbolic. ``where`` is the module path of the new calls.
    """
    if tuple(shape) == program.shape(x):
        return x
    sizes = size_arguments(shape)
    if sizes is None:
        return None
    if not is_viewable(program, x, sizes):
        x = program.call(aten.clone.default, x, where=where, memory_format=torch.contiguous_format)
    return program.call(aten.view.default, x, sizes, where=where)


def is_viewable(program: Program, x: Node, sizes: Sequence[int]) -> bool:
    """Returns True if the strides of ``x`` allow a view with these sizes."""
    try:
        with program.fake_mode, torch.no_grad():
            program.value(x).view(list(sizes))
    except (RuntimeError, ValueError):  # torch raises either, by the kind of size that does not fit
        return False
    return True


def last_or(dim: int, rank: int) -> int:
    """Returns -1 if ``dim`` is the last of ``rank`` dimensions, which is how passes write it; otherwise ``dim``."""
    return -1 if dim == rank - 1 else dim


def slice_bounds(program: Program, node: object) -> tuple[Node, int, int, int, int] | None:
    """Returns (base, dim, start, stop, step) of an ``aten.slice`` along a dimension of known size; None for other
    nodes.

    ``dim`` isn't negative, and start and stop are within the dimension.
    """
    if not isinstance(node, Node) or node.target is not aten.slice.Tensor:
        return None
    padded: list[Any] = [*node.args, *([None] * (5 - len(node.args)))]
    base, dim, start, stop, step = padded
    shape = program.shape(base)
    dim = (dim or 0) % len(shape)
    if not shape[dim].is_Integer or any(isinstance(a, Node) for a in (start, stop, step)):
        return None
    low, high, by = slice(start, stop, step).indices(int(shape[dim]))
    return base, dim, low, max(low, high), by
