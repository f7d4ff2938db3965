"""Replaces ops that have a second name, or a more general form, in ATen by that."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import Anything, Bind, Call, Match, Number, RewritePass, Rule

from ..ir.program import Program
from ..ir.weights import COMPUTED, Source

aten = torch.ops.aten


class MinimumOfTwo(Rule):
    """Replaces min(a, b) and max(a, b) of two tensors by ``aten.minimum`` and ``aten.maximum``."""

    name = "minimum_of_two"
    pattern = Call((aten.min.other, aten.max.other), Bind("a"), Bind("b"))

    def rewrite(self, program: Program, match: Match) -> Node:
        target = aten.minimum.default if match.root.target is aten.min.other else aten.maximum.default
        return program.call(target, match.node("a"), match.node("b"), where=match.where)


class GatherRows(Rule):
    """Replaces gather(table [1, P, D], 1, ids), with the same ids [1, T, 1] in each of D columns, by the rows ``ids``
    of the table.
    """

    name = "gather_rows"
    pattern = Call(aten.gather.default, Bind("table"), 1, Call(aten.cat.default, Anything("columns"), Number("dim")))

    def check(self, program: Program, match: Match) -> str | None:
        table, columns = program.shape(match.node("table")), match.bound["columns"]
        whole = len(columns) == table[-1] and match.bound["dim"] in (2, -1)
        if len(table) != 3 or table[0] != 1 or not whole or len(set(columns)) != 1:
            return "isn't of whole rows of one table"
        return None if columns[0].target is aten.unsqueeze.default else "isn't by a number for each row"

    def rewrite(self, program: Program, match: Match) -> Node:
        rows = program.call(aten.squeeze.dim, match.node("table"), 0, where=match.where)
        (ids,) = set(match.bound["columns"])
        numbers = program.call(aten.squeeze.dim, ids, -1, where=match.where)
        return program.call(aten.embedding.default, rows, numbers, where=match.where)


class IndexedPlace(Rule):
    """Replaces x[..., [i], ...] with a single constant index i by a slice."""

    name = "indexed_place"
    pattern = Call(aten.index.Tensor, Bind("x"), Anything("indices"))

    def check(self, program: Program, match: Match) -> str | None:
        index = _only_index(match)
        weight = None if index is None else program.weight_of(_original(index[1]))
        if not isinstance(weight, Source) or not weight.name.startswith(COMPUTED):
            return "isn't indexed by one constant"
        return None if weight.shape == (1,) and weight.dtype == torch.int64 else "several places are chosen"

    def rewrite(self, program: Program, match: Match) -> Node:
        index = _only_index(match)
        assert index is not None  # check has seen to it
        dim, node = index
        weight = program.weight_of(_original(node))
        assert weight is not None
        x = match.node("x")
        place = int(weight.evaluate()) % int(program.shape(x)[dim])
        return program.call(aten.slice.Tensor, x, dim, place, place + 1, where=match.where)


def _only_index(match: Match) -> tuple[int, Node] | None:
    indices = [(i, n) for i, n in enumerate(match.bound["indices"]) if n is not None]
    return indices[0] if len(indices) == 1 else None


def _original(node: Node) -> object:
    return node.args[0] if node.target is aten.clone.default else node


class Repeat(Rule):
    """Replaces a repeat along at most one dimension by a cat of copies, or by the value itself."""

    name = "repeat"
    pattern = Call(aten.repeat.default, Bind("x"), Anything("repeats"))

    def check(self, program: Program, match: Match) -> str | None:
        repeats = match.bound["repeats"]
        if any(isinstance(r, Node) for r in repeats):
            return "how often is a symbolic size"
        if len(repeats) != program.value(match.node("x")).dim() or sum(r != 1 for r in repeats) > 1 or 0 in repeats:
            return "repeats more than one dimension, or new ones"
        return None

    def rewrite(self, program: Program, match: Match) -> Node:
        more = [(i, r) for i, r in enumerate(match.bound["repeats"]) if r != 1]
        if not more:
            return match.node("x")
        ((dim, times),) = more
        return program.call(aten.cat.default, [match.node("x")] * times, dim, where=match.where)


class WhereNumber(Rule):
    """Replaces where(condition, x, number) by the ``where`` of two tensors."""

    name = "where_number"
    pattern = Call(aten.where.ScalarOther, Bind("condition"), Bind("x"), Number("number"))

    def rewrite(self, program: Program, match: Match) -> Node:
        number, dtype, where = match.bound["number"], program.value(match.root).dtype, match.where
        source = Source(f"number:{number}", (1,), dtype, lambda: torch.full((1,), number, dtype=dtype))
        constant = program.weight(f"number_{number}", source, where=where)
        condition, x = match.node("condition"), match.node("x")
        return program.call(aten.where.self, condition, x, constant, where=where)


class NormalizeSpellings(RewritePass):
    """Replaces special forms of ops by general ones: min and max of two tensors, repeat, gather of rows, an index of
    one place, and where with a number.
    """

    name = "normalize_spellings"
    rules: ClassVar[tuple[Rule, ...]] = (
        MinimumOfTwo(),
        GatherRows(),
        IndexedPlace(),
        Repeat(),
        WhereNumber(),
    )
