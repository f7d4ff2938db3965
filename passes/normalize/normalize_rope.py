"""Replaces every spelling of rotary embedding by ``ew.rope_table`` and ``ew.rope`` of x [T, N, D]."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import Anything, Bind, Call, Match, Number, Pattern, RewritePass, Rule
from enginewright.passes.framework.views import RESHAPES, view_as

from ..ir.program import Program
from ..ir.provenance import where_of
from .rope_columns import Columns, read_columns

aten, ew = torch.ops.aten, torch.ops.ew


_COS, _SIN = Bind("cos"), Bind("sin")


class _RopeRule(Rule):
    """The common part of the rules for rotary embedding of x [T, N, 2F] with tables ``cos`` and ``sin`` [T, 1, C].

    For a single head x may be [T, 2F] and the tables [T, C].

    Attributes:
        interleaved: True if the members of a pair are adjacent in x and in the result.
        apart: True if the members of a pair are adjacent in x, but the result has all first members before all second
            ones.
    """

    interleaved: ClassVar[bool] = False
    apart: ClassVar[bool] = False

    def columns(self, frequencies: int) -> tuple[int, ...]:
        """Returns for each column of a table the index of its frequency. ``frequencies`` is their number."""
        return (*range(frequencies), *range(frequencies))

    def check(self, program: Program, match: Match) -> str | None:
        x = match.node("x")
        if program.value(x).dim() not in (2, 3):
            return f"x has rank {program.value(x).dim()}, not 3, or 2 for a single head"
        cos, sin = (_table(program, match.node(n), x) for n in ("cos", "sin"))
        if cos is None or sin is None:
            return "no cos and sin [T, 1, ..] of positions times frequencies"
        if (cos.function, sin.function) != ("cos", "sin"):
            return f"has {cos.function} where cos belongs, and {sin.function} where sin does"
        if (cos.positions, cos.frequencies, cos.scale) != (sin.positions, sin.frequencies, sin.scale):
            return "cos and sin are of different angles"
        frequencies = int(program.shape(cos.frequencies)[0])
        if cos.columns != sin.columns or cos.columns != self.columns(frequencies):
            return f"the columns of the tables are of the frequencies {list(cos.columns)} and {list(sin.columns)}"
        if program.shape(x)[-1] != 2 * frequencies:
            return f"{frequencies} frequencies for a width of {program.shape(x)[-1]}"
        if match.bound["size"] != 2 * frequencies or match.bound.get("half", frequencies) != frequencies:
            return "the parts that are exchanged are not the members of pairs"
        return None

    def rewrite(self, program: Program, match: Match) -> Node:
        x, where = match.node("x"), match.where
        cos = _table(program, match.node("cos"), x)
        assert cos is not None  # check has seen to it
        origin = where_of(a for n in ("cos", "sin") for a in match.node(n).all_input_nodes)
        table = program.call(ew.rope_table.default, cos.positions, cos.frequencies, cos.scale, where=origin)
        single = program.value(x).dim() == 2
        if single:
            x = program.call(aten.unsqueeze.default, x, 1, where=where)
        if self.apart:
            size = int(program.shape(x)[-1])
            members = [program.call(aten.slice.Tensor, x, -1, i, size, 2, where=where) for i in (0, 1)]
            x = program.call(aten.cat.default, members, -1, where=where)
        new = program.call(ew.rope.default, x, table, self.interleaved, where=where)
        return program.call(aten.select.int, new, 1, 0, where=where) if single else new


def _table(program: Program, node: Node, x: Node) -> Columns | None:
    """Returns the columns of a table [T, 1, C], or [T, C] if x has one head.

    None if the value isn't computed from positions times frequencies.
    """
    if program.value(x).dim() == 2:
        return read_columns(program, node)
    if node.target is not aten.unsqueeze.default or node.args[1] not in (1, -2):
        return None
    return read_columns(program, node.args[0])


_FIRST_HALF = Call(aten.slice.Tensor, Bind("x"), -1, 0, Number("half"), 1)
_SECOND_HALF = Call(aten.slice.Tensor, Bind("x"), -1, Number("half"), Number("size"), 1)
_EVEN = Call(aten.slice.Tensor, Bind("x"), -1, 0, Number("size"), 2)
_ODD = Call(aten.slice.Tensor, Bind("x"), -1, 1, Number("size"), 2)


def _sum(turned: Pattern) -> Pattern:
    """Returns the pattern of x * cos + turned * sin."""
    return Call(aten.add.Tensor, Call(aten.mul.Tensor, Bind("x"), _COS), Call(aten.mul.Tensor, turned, _SIN), alpha=1)


class RotateHalf(_RopeRule):
    """Replaces x * cos + cat(-second half, first half) * sin by ``ew.rope``."""

    name = "rotate_half"
    pattern = _sum(Call(aten.cat.default, [Call(aten.neg.default, _SECOND_HALF), _FIRST_HALF], -1))


class RotatePairs(_RopeRule):
    """Replaces x * cos + stack(-odd, even) * sin, with each frequency twice in a row, by ``ew.rope``."""

    name = "rotate_pairs"
    interleaved = True
    pattern = _sum(Call(RESHAPES, Call(aten.stack.default, [Call(aten.neg.default, _ODD), _EVEN], -1)))

    def columns(self, frequencies: int) -> tuple[int, ...]:
        return tuple(i // 2 for i in range(2 * frequencies))


def _rotated(first: Pattern, second: Pattern) -> list[Pattern]:
    """Returns the patterns of first * cos - second * sin, and of second * cos + first * sin."""
    return [
        Call(aten.sub.Tensor, Call(aten.mul.Tensor, first, _COS), Call(aten.mul.Tensor, second, _SIN), alpha=1),
        Call(aten.add.Tensor, Call(aten.mul.Tensor, second, _COS), Call(aten.mul.Tensor, first, _SIN), alpha=1),
    ]


class RotateParts(_RopeRule):
    """Replaces cat(first * cos - second * sin, second * cos + first * sin), each frequency once, by ``ew.rope``."""

    name = "rotate_parts"
    pattern = Call(aten.cat.default, _rotated(_FIRST_HALF, _SECOND_HALF), -1)

    def columns(self, frequencies: int) -> tuple[int, ...]:
        return tuple(range(frequencies))


class RotatePairsApart(RotateParts):
    """Replaces cat(even * cos - odd * sin, odd * cos + even * sin) by ``ew.rope``. Adjacent pairs of x come out as two
    halves.
    """

    name = "rotate_pairs_apart"
    apart = True
    pattern = Call(aten.cat.default, _rotated(_EVEN, _ODD), -1)


class RotatePairsInPlace(RotateParts):
    """Replaces stack(even * cos - odd * sin, odd * cos + even * sin) by ``ew.rope``: products of complex numbers,
    spelled out.
    """

    name = "rotate_pairs_in_place"
    interleaved = True
    pattern = Call(RESHAPES, Call(aten.stack.default, _rotated(_EVEN, _ODD), -1))

    def check(self, program: Program, match: Match) -> str | None:
        if sum(not s.is_Integer for s in program.shape(match.root)) > 1:
            return "the pairs are seen with several unknown sizes"
        return super().check(program, match)

    def rewrite(self, program: Program, match: Match) -> Node:
        # The view that puts the pairs back into one dimension may be one with a view behind it.
        new = view_as(program, super().rewrite(program, match), program.shape(match.root), match.where)
        assert new is not None  # check has seen to it
        return new


class PassRest(Rule):
    """Replaces cat(rope(first part of x), rest of x) by ``ew.rope`` of x, which leaves the rest unchanged."""

    name = "pass_rest"
    pattern = Call(
        aten.cat.default,
        [
            Call(
                ew.rope.default,
                Call(aten.slice.Tensor, Bind("x"), -1, 0, Number("cut"), 1),
                Bind("table"),
                Anything("interleaved"),
            ),
            Call(aten.slice.Tensor, Bind("x"), -1, Number("cut"), Number("size"), 1),
        ],
        -1,
    )

    def check(self, program: Program, match: Match) -> str | None:
        size = program.shape(match.node("x"))[-1]
        return None if match.bound["size"] == size else f"only {match.bound['size']} of {size} columns pass"

    def rewrite(self, program: Program, match: Match) -> Node:
        x, table, interleaved = (match.bound[n] for n in ("x", "table", "interleaved"))
        return program.call(ew.rope.default, x, table, interleaved, where=match.where)


class NormalizeRope(RewritePass):
    """Replaces rotary embedding of x [T, N, D], in all dimensions or the first 2F, by ``ew.rope`` with an
    ``ew.rope_table``.

    Each application gets its own table; ``MergeCommonSubexpressions`` leaves one for all.
    """

    name = "normalize_rope"
    rules: ClassVar[tuple[Rule, ...]] = (
        RotateHalf(),
        RotatePairs(),
        RotateParts(),
        RotatePairsApart(),
        RotatePairsInPlace(),
        PassRest(),
    )
