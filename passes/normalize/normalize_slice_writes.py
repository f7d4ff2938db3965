"""Turns a tensor that is created empty and written slice by slice into the concatenation of the written values."""

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
    """The range ``start`` to ``stop`` of the result, with the elements of ``value`` from ``first`` on."""

    start: int
    stop: int
    value: Node
    first: int


class CopyOver(Rule):
    """copy(into, x): x as ``into`` has it, spread over its shape and cast to its dtype."""

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


class SliceWrites(Rule):
    """slice_scatter(slice_scatter(empty, a, dim, 0, n), b, dim, n) -> cat(a, b). A range that wasn't written stays a
    slice.
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
    """Returns the values that were last written to each range of ``node`` along ``dim``, in order."""
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
    """Turns aten.copy and aten.slice_scatter into aten.cat of the written values."""

    name = "normalize_slice_writes"
    rules: ClassVar[tuple[Rule, ...]] = (CopyOver(), SliceWrites())
