"""Reads a table of cosines or sines: which frequency is in each of its columns, however it was put together."""

from __future__ import annotations

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

    positions: [T] of an integer type. frequencies: [F], a weight. function: "cos", "sin" or "" (the angle).
    """

    positions: Node
    frequencies: Node
    columns: tuple[int, ...]
    function: str = ""
    scale: float = 1.0


def read_columns(program: Program, node: object) -> Columns | None:
    """The columns of a value [T, C]; None if it isn't made of positions times frequencies."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target in (aten.cos.default, aten.sin.default):
        inner = read_columns(program, node.args[0])
        if inner is None or inner.function or inner.scale != 1.0:
            return None
        return replace(inner, function="cos" if node.target is aten.cos.default else "sin")
    if node.target is aten.mul.Tensor:
        return _read_product(program, node)
    if node.target is aten.cat.default:
        return _read_cat(program, node)
    if node.target is aten.repeat_interleave.self_int:
        arguments = bound_arguments(node)
        inner, times = read_columns(program, arguments["self"]), arguments["repeats"]
        if inner is None or arguments["dim"] not in (1, -1) or not isinstance(times, int):
            return None
        return replace(inner, columns=tuple(c for c in inner.columns for _ in range(times)))
    if node.target is aten._to_copy.default:  # ew.rope casts its table to what it rotates
        return read_columns(program, node.args[0]) if program.value(node).dtype.is_floating_point else None
    bounds = slice_bounds(program, node)
    inner = read_columns(program, bounds[0]) if bounds is not None and bounds[1] == 1 else None
    return (
        replace(inner, columns=inner.columns[slice(*bounds[2:])]) if inner is not None and bounds is not None else None
    )


def _read_product(program: Program, node: Node) -> Columns | None:
    """A table times a number, or positions [T, 1] times frequencies [F]."""
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
    """[T] behind its view as [T, 1] and its cast to float, in any order."""
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
