"""Ops that ATen has a second name or a more general form for become those."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import Anything, Bind, Call, Match, Number, RewritePass, Rule

from ..ir.program import Program
from ..ir.weights import Source

aten = torch.ops.aten


class MinimumOfTwo(Rule):
    """min(a, b) and max(a, b) of two tensors."""

    name = "minimum_of_two"
    pattern = Call((aten.min.other, aten.max.other), Bind("a"), Bind("b"))

    def rewrite(self, program: Program, match: Match) -> Node:
        target = aten.minimum.default if match.root.target is aten.min.other else aten.maximum.default
        return program.call(target, match.node("a"), match.node("b"), where=match.where)


class Repeat(Rule):
    """repeat along one dimension -> cat of the same value."""

    name = "repeat"
    pattern = Call(aten.repeat.default, Bind("x"), Anything("repeats"))

    def check(self, program: Program, match: Match) -> str | None:
        repeats = match.bound["repeats"]
        if any(isinstance(r, Node) for r in repeats):
            return "how often is a symbolic size"
        if len(repeats) != program.value(match.node("x")).dim() or sum(r != 1 for r in repeats) != 1 or 0 in repeats:
            return "repeats more than one dimension, or new ones"
        return None

    def rewrite(self, program: Program, match: Match) -> Node:
        repeats = match.bound["repeats"]
        dim, times = next((i, r) for i, r in enumerate(repeats) if r != 1)
        return program.call(aten.cat.default, [match.node("x")] * times, dim, where=match.where)


class WhereNumber(Rule):
    """where(condition, x, number) -> where of two tensors."""

    name = "where_number"
    pattern = Call(aten.where.ScalarOther, Bind("condition"), Bind("x"), Number("number"))

    def rewrite(self, program: Program, match: Match) -> Node:
        number, dtype, where = match.bound["number"], program.value(match.root).dtype, match.where
        source = Source(f"number:{number}", (1,), dtype, lambda: torch.full((1,), number, dtype=dtype))
        constant = program.weight(f"number_{number}", source, where=where)
        condition, x = match.node("condition"), match.node("x")
        return program.call(aten.where.self, condition, x, constant, where=where)


class NormalizeSpellings(RewritePass):
    """aten.min, aten.max of two tensors, aten.repeat and aten.where with a number -> their general forms."""

    name = "normalize_spellings"
    rules: ClassVar[tuple[Rule, ...]] = (MinimumOfTwo(), Repeat(), WhereNumber())
