"""Finds the frequency in each column of a table of cosines or sines, however the table is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.views import slice_bounds

from ..ir.program import Program

aten = torch.ops.aten


@dataclass(frozen=True)
class Columns:
    """A value [T, C] whose column c is ``scale * function(positions * frequencies[columns[c]])``.

    Attributes:
        positions: [T] of an integer type.
        frequencies: [F], a weight.
        columns: [C], for each column the index of its frequency.
        function: "cos", "sin", or "" for the angle itself.
        scale: a constant factor.
    """

    positions: Node
    frequencies: Node
    columns: tuple[int, ...]
    function: str = ""
    scale: float = 1.0


def read_columns(program: Program, node: object) -> Columns | None:
    """Returns the columns of a table [T, C]; None if it isn't computed from positions times frequencies."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    return _READERS.get(node.target, _read_slice)(program, node)


def _read_wave(program: Program, node: Node) -> Columns | None:
    """Reads the cosines or sines of angles."""
    inner = read_columns(program, node.args[0])
    if inner is None or inner.function or inner.scale != 1.0:
        return None
    return replace(inner, function="cos" if node.target is aten.cos.default else "sin")


def _read_repeated(program: Program, node: Node) -> Columns | None:
    """Reads a table whose columns are each repeated several times in a row; None if the node has another form."""
    arguments = bound_arguments(node)
    inner, times = read_columns(program, arguments["self"]), arguments["repeats"]
    if inner is None or arguments["dim"] not in (1, -1) or not isinstance(times, int):
        return None
    return replace(inner, columns=tuple(c for c in inner.columns for _ in range(times)))


def _read_cast(program: Program, node: Node) -> Columns | None:
    """Reads a table that is cast to another float type. ``ew.rope`` casts its table to the type of x, so the cast can
    go.
    """
    return read_columns(program, node.args[0]) if program.value(node).dtype.is_floating_point else None


def _read_slice(program: Program, node: Node) -> Columns | None:
    """Reads a slice of a table's columns."""
    bounds = slice_bounds(program, node)
    inner = read_columns(program, bounds[0]) if bounds is not None and bounds[1] == 1 else None
    if inner is None or bounds is None:
        return None
    return replace(inner, columns=inner.columns[slice(*bounds[2:])])


def _read_product(program: Program, node: Node) -> Columns | None:
    """Reads a table times a number, or the product of positions [T, 1] and frequencies [F]."""
    first, second = node.args
    if isinstance(second, (int, float)):
        inner = read_columns(program, first)
        return replace(inner, scale=inner.scale * second) if inner is not None and inner.function else None
    if program.weight_of(first) is not None:
        first, second = second, first
    positions = _positions(program, first)
    if positions is None or not isinstance(second, Node) or program.weight_of(second) is None:
        return None
    shape = program.shape(second)
    if len(shape) != 1 or not program.value(second).dtype.is_floating_point:
        return None
    return Columns(positions, second, tuple(range(int(shape[0]))))


def _read_cat(program: Program, node: Node) -> Columns | None:
    """Reads tables next to each other, which may only differ in the order of their frequencies."""
    arguments = bound_arguments(node)
    parts = [read_columns(program, n) for n in arguments["tensors"]]
    known = [p for p in parts if p is not None]
    if (
        len(known) != len(parts)
        or arguments["dim"] not in (1, -1)
        or any(replace(p, columns=()) != replace(known[0], columns=()) for p in known)
    ):
        return None
    return replace(known[0], columns=tuple(c for p in known for c in p.columns))


def _positions(program: Program, node: object) -> Node | None:
    """Returns the positions [T] of which a value is a view [T, 1], cast to floats before or after; None for another
    value.
    """
    column = False
    while isinstance(node, Node):
        if node.target is aten._to_copy.default:
            node = node.args[0]
        elif node.target is aten.unsqueeze.default and node.args[1] in (1, -1):
            column, node = True, node.args[0]
        else:
            value = program.value(node)
            return node if column and value.dim() == 1 and not value.dtype.is_floating_point else None
    return None


_READERS: Mapping[object, Callable[[Program, Node], Columns | None]] = {
    aten.cos.default: _read_wave,
    aten.sin.default: _read_wave,
    aten.mul.Tensor: _read_product,
    aten.cat.default: _read_cat,
    aten.repeat_interleave.self_int: _read_repeated,
    aten._to_copy.default: _read_cast,
}
"""Ops -> the function that reads the columns of their result. Results of other ops are tried as slices."""
