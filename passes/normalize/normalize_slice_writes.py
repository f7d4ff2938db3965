"""Replaces a tensor that is created empty and written slice by slice by the concatenation of the written values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import Bind, Call, Match, RewritePass, Rule, bound_arguments
from enginewright.passes.framework.views import last_or

from ..ir.program import Program

aten = torch.ops.aten

_UNWRITTEN = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default)


@dataclass(frozen=True)
class _Part:
    """Indices ``start`` to ``stop`` of a result, which hold the elements of ``value`` from index ``first`` on."""

    start: int
    stop: int
    value: Node
    first: int


class CopyOver(Rule):
    """Replaces copy(into, x) by x, broadcast to the shape of ``into`` and cast to its dtype."""

    name = "copy_over"
    pattern = Call(aten.copy.default, Bind("into"), Bind("x"))

    def check(self, program: Program, match: Match) -> str | None:
        x, into = (program.shape(match.node(n)) for n in ("x", "into"))
        padded = (1,) * (len(into) - len(x)) + tuple(x)
        if any(old != new and not new.is_Integer for old, new in zip(padded, into, strict=True)):
            return "x is spread over tokens"
        return None

    def rewrite(self, program: Program, match: Match) -> Node:
        x, into = match.node("x"), match.node("into")
        if program.shape(x) != program.shape(into):
            sizes = [int(s) if s.is_Integer else -1 for s in program.shape(into)]
            x = program.call(aten.expand.default, x, sizes, where=match.where)
        dtype = program.value(into).dtype
        if program.value(x).dtype != dtype:
            x = program.call(aten._to_copy.default, x, where=match.where, dtype=dtype)
        return x


class SameWrites(Rule):
    """Replaces a write of a slice of x into the same slice of x (slice_scatter or select_scatter) by x.

    The slice may also be of another tensor with the same values. For text, rotary embeddings of three axes (M-RoPE)
    assemble the frequencies from three equal rows.
    """

    name = "same_writes"
    pattern = Call((aten.slice_scatter.default, aten.select_scatter.default))

    def check(self, program: Program, match: Match) -> str | None:
        arguments = bound_arguments(match.root)
        written = arguments["src"]
        if written.target is aten.copy.default:
            written = bound_arguments(written)["src"]
        read = aten.select.int if match.root.target is aten.select_scatter.default else aten.slice.Tensor
        if written.target is not read:
            return "what is written isn't a part of another tensor"
        places = bound_arguments(written)
        if any(places[name] != arguments[name] for name in ("dim", "start", "end", "step", "index") if name in places):
            return "it is written to another place"
        return None if _same(program, places["self"], arguments["self"]) else "it is a part of another tensor"

    def rewrite(self, program: Program, match: Match) -> Node:
        x: Node = bound_arguments(match.root)["self"]
        return x


def _same(program: Program, a: object, b: object) -> bool:
    """Returns True if two nodes are known to have the same values: one node, or the same op of the same arguments."""
    if a == b:
        return True
    if not (isinstance(a, Node) and isinstance(b, Node)) or a.target is not b.target or a.op != "call_function":
        return False
    first, second = bound_arguments(a), bound_arguments(b)
    if a.target is aten.select.int and _is_equal_along(program, first["self"], int(first["dim"])):
        second = {**second, "index": first["index"]}
    return all(_same(program, first[name], second[name]) for name in first)


def _is_equal_along(program: Program, x: Node, dim: int) -> bool:
    """Returns True if x is constant along the dimension ``dim``, because it was broadcast over it."""
    shape = program.shape(x)
    dim = dim % len(shape)
    if shape[dim] == 1:
        return True
    if x.op != "call_function" or not isinstance(x.target, torch._ops.OpOverload):
        return False
    if x.target is aten.expand.default:
        source = program.shape(x.args[0])  # type: ignore[arg-type]
        before = dim - (len(shape) - len(source))
        return before < 0 or source[before] == 1 or _is_equal_along(program, x.args[0], before)  # type: ignore[arg-type]
    if x.target is aten.slice.Tensor:
        return _is_equal_along(program, x.args[0], dim)  # type: ignore[arg-type]
    if x.target is aten.unsqueeze.default:
        at = int(bound_arguments(x)["dim"]) % len(shape)
        return at != dim and _is_equal_along(program, x.args[0], dim - (at < dim))  # type: ignore[arg-type]
    if x.target is not aten._to_copy.default and torch.Tag.pointwise not in x.target.tags:
        return False
    places = ((node, dim - (len(shape) - len(program.shape(node)))) for node in x.all_input_nodes)
    return all(at < 0 or _is_equal_along(program, node, at) for node, at in places)


class SliceWrites(Rule):
    """Replaces slice_scatter(slice_scatter(empty, a, dim, 0, n), b, dim, n) by cat(a, b).

    A range that wasn't written becomes a slice of the original tensor.
    """

    name = "slice_writes"
    pattern = Call(aten.slice_scatter.default)

    def check(self, program: Program, match: Match) -> str | None:
        if any(u.target is aten.slice_scatter.default and u.args[0] is match.root for u in match.root.users):
            return "more is written into the result"
        parts = _parts(program, match.root, _dim(program, match.root))
        if any(p.value.target is aten.slice_scatter.default for p in parts):
            return "is not written along one dimension of known size, one by one"
        if any(p.value.target in _UNWRITTEN for p in parts):
            return "a part is never written"
        return None

    def rewrite(self, program: Program, match: Match) -> Node:
        dim, where = _dim(program, match.root), match.where
        rank, values = program.value(match.root).dim(), []
        for part in _parts(program, match.root, dim):
            value, size = part.value, part.stop - part.start
            if program.shape(value)[dim] != size:
                value = program.call(aten.slice.Tensor, value, dim, part.first, part.first + size, where=where)
            values.append(value)
        return (
            values[0] if len(values) == 1 else program.call(aten.cat.default, values, last_or(dim, rank), where=where)
        )


def _dim(program: Program, node: Node) -> int:
    rank: int = program.value(node).dim()
    return int(bound_arguments(node)["dim"]) % rank


def _parts(program: Program, node: Node, dim: int) -> list[_Part]:
    """Returns which value each range of ``node`` along ``dim`` was last written with, in order."""
    size = program.shape(node)[dim]
    if not size.is_Integer:
        return [_Part(0, 0, node, 0)]
    whole = [_Part(0, int(size), node, 0)]
    if node.target is not aten.slice_scatter.default or _dim(program, node) != dim:
        return whole
    arguments = bound_arguments(node)
    if arguments["step"] != 1 or any(isinstance(arguments[n], Node) for n in ("start", "end")):
        return whole
    start, stop, _ = slice(arguments["start"], arguments["end"]).indices(int(size))
    parts = []
    for part in _parts(program, arguments["self"], dim):
        if part.start < start:
            parts.append(_Part(part.start, min(part.stop, start), part.value, part.first))
        if part.stop > stop:
            after = max(part.start, stop)
            parts.append(_Part(after, part.stop, part.value, part.first + after - part.start))
    parts.append(_Part(start, stop, arguments["src"], 0))
    return sorted((p for p in parts if p.start < p.stop), key=lambda p: p.start)


class NormalizeSliceWrites(RewritePass):
    """Replaces aten.copy and aten.slice_scatter by aten.cat of the written values and the remaining old ones."""

    name = "normalize_slice_writes"
    rules: ClassVar[tuple[Rule, ...]] = (SameWrites(), CopyOver(), SliceWrites())
