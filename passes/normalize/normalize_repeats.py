"""Replaces repetitions of single elements, and stacks, by concatenations."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import Anything, Bind, Call, Match, Number, RewritePass, Rule
from enginewright.passes.framework.views import last_or

from ..ir.program import Program

aten = torch.ops.aten


class RepeatInterleave(Rule):
    """Replaces repeat_interleave(x, n, dim) by a concatenation of n copies along a new dimension after ``dim``, merged
    with it.
    """

    name = "repeat_interleave"
    pattern = Call(aten.repeat_interleave.self_int, Bind("x"), Number("times"), Number("dim"))

    def check(self, program: Program, match: Match) -> str | None:
        sizes = program.shape(match.node("x"))
        dim = match.bound["dim"] % len(sizes)
        if not sizes[dim].is_Integer or sum(not s.is_Integer for s in sizes) > 1:
            return "repeats tokens, or has several symbolic sizes"
        return None

    def rewrite(self, program: Program, match: Match) -> Node:
        x, times, where = match.node("x"), match.bound["times"], match.where
        sizes = [int(s) if s.is_Integer else -1 for s in program.shape(x)]
        dim = match.bound["dim"] % len(sizes)
        column = program.call(aten.unsqueeze.default, x, dim + 1, where=where)
        repeated = program.call(aten.cat.default, [column] * times, last_or(dim + 1, len(sizes) + 1), where=where)
        sizes[dim] *= times
        return program.call(aten.view.default, repeated, sizes, where=where)


class Stack(Rule):
    """Replaces stack(values, dim) by a concatenation of the values along a new dimension."""

    name = "stack"
    pattern = Call(aten.stack.default, Anything("values"), Number("dim"))

    def rewrite(self, program: Program, match: Match) -> Node:
        values, where = match.bound["values"], match.where
        rank = program.value(match.root).dim()
        dim = match.bound["dim"] % rank
        columns = [program.call(aten.unsqueeze.default, v, dim, where=where) for v in values]
        return program.call(aten.cat.default, columns, last_or(dim, rank), where=where)


class NormalizeRepeats(RewritePass):
    """Replaces aten.repeat_interleave and aten.stack that aren't part of a rotation by aten.cat."""

    name = "normalize_repeats"
    rules: ClassVar[tuple[Rule, ...]] = (RepeatInterleave(), Stack())
