"""Removes calls that return their argument."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.aten_ops import dimension_order, ops_of
from enginewright.passes.framework.match import Bind, Call, Match, Pattern, RewritePass, Rule, bound_arguments, fits
from enginewright.passes.framework.views import RESHAPES, last_or, slice_bounds, view_as

from ..ir.program import Program

aten = torch.ops.aten

_VIEWS = (
    *RESHAPES,
    aten.expand.default,
    aten.slice.Tensor,
    aten.transpose.int,
    aten.permute.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
_SPLITS = ops_of("split", "unbind")


@dataclass(frozen=True)
class When(Pattern):
    """Matches a call that matches ``pattern`` and for which ``holds`` returns True."""

    pattern: Pattern
    holds: Callable[[Program, Node], bool]

    def matches(self, program: Program, value: Any, match: Match) -> Iterator[Match]:
        for fit in fits(program, self.pattern, value, match):
            if self.holds(program, value):
                yield fit


def _same_shape(program: Program, node: Node) -> bool:
    source = node.args[0]
    return isinstance(source, Node) and program.shape(source) == program.shape(node)


def _shows_the_same(program: Program, node: Node) -> bool:
    if node.target not in (aten.permute.default, aten.transpose.int):
        return _same_shape(program, node)
    rank = program.value(node).dim()
    return dimension_order(bound_arguments(node), rank) == list(range(rank))


def _cancels(program: Program, node: Node) -> bool:
    """Returns True if a call transposes a transpose of the same two dimensions."""
    inner, rank = node.args[0], program.value(node).dim()
    assert isinstance(inner, Node)
    return dimension_order(bound_arguments(node), rank) == dimension_order(bound_arguments(inner), rank)


def _is_piece(program: Program, node: Node) -> bool:
    """Returns True if a getitem selects one of the results of a split, chunk or unbind."""
    split = node.args[0]
    assert isinstance(split, Node)
    return split.target in _SPLITS and not any(isinstance(a, Node) for a in split.args[1:])


def _adjoin(program: Program, node: Node) -> bool:
    """Returns True if a cat joins adjacent slices of one value, along their dimension and in order."""
    return _joined_bounds(program, node) is not None


def _joined_bounds(program: Program, node: Node) -> tuple[Node, int, int, int] | None:
    """Returns (base, dim, start, stop) of the slice that equals a cat of adjacent slices; None if the cat isn't one."""
    arguments = bound_arguments(node)
    parts: list[Node] = arguments["tensors"]
    dim: int = arguments["dim"] % program.value(node).dim()
    all_bounds = [slice_bounds(program, p) for p in parts]
    bounds = [b for b in all_bounds if b is not None]
    if len(bounds) != len(all_bounds) or any(b[0] is not bounds[0][0] or b[1] != dim or b[4] != 1 for b in bounds):
        return None
    if any(a[3] != b[2] for a, b in pairwise(bounds)):
        return None
    return bounds[0][0], dim, bounds[0][2], bounds[-1][3]


def _is_empty(program: Program, node: Node) -> bool:
    return any(s == 0 for s in program.shape(node))


def _has_empty_parts(program: Program, node: Node) -> bool:
    """Returns True if a cat has empty parts among others, or only one part."""
    parts = [p for p in bound_arguments(node)["tensors"] if not _is_empty(program, p)]
    return len(parts) == 1 or 0 < len(parts) < len(bound_arguments(node)["tensors"])


class _GivesX(Rule):
    """A rule that replaces a call by its input ``x``. The pattern matches only calls whose result equals ``x``."""

    def rewrite(self, program: Program, match: Match) -> Node:
        return match.node("x")


class DropCast(_GivesX):
    """Removes casts of x to its own dtype."""

    name = "drop_cast"
    pattern = Call((aten._to_copy.default, aten.type_as.default), Bind("x"))

    def check(self, program: Program, match: Match) -> str | None:
        old, new = program.value(match.node("x")).dtype, program.value(match.root).dtype
        return None if old == new else f"changes {old} into {new}"


class DropCopy(_GivesX):
    """Removes copies, since no op writes to a value. A copy stays if a view of it depends on its order in memory."""

    name = "drop_copy"
    pattern = Call(
        (aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default), Bind("x")
    )

    def check(self, program: Program, match: Match) -> str | None:
        strides = [
            tuple(program.expression(s) for s in program.value(n).stride()) for n in (match.node("x"), match.root)
        ]
        if strides[0] == strides[1] or not any(u.target in RESHAPES for u in match.root.users):
            return None
        return "a view needs the order in memory that the copy has"


class DropDropout(_GivesX):
    """Removes dropout that isn't in training mode, which returns its input."""

    name = "drop_dropout"
    pattern = Call(aten.dropout.default, Bind("x"), train=False)


class DropNeutral(_GivesX):
    """Removes x * 1, x / 1, x ** 1, x + 0 and x - 0, unless they change the dtype of x."""

    name = "drop_neutral"
    pattern = Call(
        (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar), Bind("x"), 1
    ) | Call((aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar), Bind("x"), 0)

    def check(self, program: Program, match: Match) -> str | None:
        old, new = program.value(match.node("x")).dtype, program.value(match.root).dtype
        return None if old == new else f"changes {old} into {new}"


class DropView(_GivesX):
    """Removes views that don't change the shape."""

    name = "drop_view"
    pattern = When(Call(_VIEWS, Bind("x")), _shows_the_same)


class JoinViews(Rule):
    """Replaces a view of a view of x by one view of x."""

    name = "join_views"
    pattern = Call(RESHAPES, Call(RESHAPES, Bind("x")))

    def check(self, program: Program, match: Match) -> str | None:
        if sum(not s.is_Integer for s in program.shape(match.root)) > 1:
            return "several sizes are symbolic"
        return None

    def rewrite(self, program: Program, match: Match) -> Node:
        joined = view_as(program, match.node("x"), program.shape(match.root), match.where)
        assert joined is not None  # check has seen to it
        return joined


class CancelTransposes(_GivesX):
    """Removes two transposes of the same dimensions, one after the other."""

    name = "cancel_transposes"

    pattern = When(Call(aten.transpose.int, Call(aten.transpose.int, Bind("x"))), _cancels)


class CancelUnsqueeze(_GivesX):
    """Removes an unsqueeze in front together with the select or squeeze that undoes it."""

    name = "cancel_unsqueeze"
    pattern = Call((aten.select.int, aten.squeeze.dim), Call(aten.unsqueeze.default, Bind("x"), 0), 0)


class SplitToSlices(Rule):
    """Replaces a result of a split or chunk by a slice, and a result of an unbind by a select."""

    name = "split_to_slices"
    pattern = When(Call(operator.getitem, Call(_SPLITS)), _is_piece)

    def rewrite(self, program: Program, match: Match) -> Node:
        split, index = match.root.args[0], match.root.args[1]
        assert isinstance(split, Node) and isinstance(index, int)
        arguments = bound_arguments(split)
        x, pieces = arguments["self"], split.meta["val"]
        index, dim = index % len(pieces), arguments["dim"] % program.value(x).dim()
        if split.target is aten.unbind.int:
            return program.call(aten.select.int, x, dim, index, where=match.where)
        sizes = [int(program.expression(p.shape[dim])) for p in pieces]
        start = sum(sizes[:index])
        dim = last_or(dim, program.value(x).dim())
        return program.call(aten.slice.Tensor, x, dim, start, start + sizes[index], where=match.where)

    def check(self, program: Program, match: Match) -> str | None:
        split = match.root.args[0]
        assert isinstance(split, Node)
        x, dim = bound_arguments(split)["self"], bound_arguments(split)["dim"]
        return None if program.shape(x)[dim].is_Integer else "splits a dimension of symbolic size"


class JoinSlices(Rule):
    """Replaces a concatenation of adjacent slices of one value by one slice, or by the value if the slices cover it."""

    name = "join_slices"
    pattern = When(Call(aten.cat.default), _adjoin)

    def rewrite(self, program: Program, match: Match) -> Node:
        bounds = _joined_bounds(program, match.root)
        assert bounds is not None
        base, dim, start, stop = bounds
        if program.shape(base) == program.shape(match.root):
            return base
        return program.call(
            aten.slice.Tensor, base, last_or(dim, program.value(base).dim()), start, stop, where=match.where
        )


class DropEmptyParts(Rule):
    """Removes the empty parts of a concatenation. If one part is left, it replaces the concatenation.

    Partial rotary embedding makes empty parts if all of a head is rotated.
    """

    name = "drop_empty_parts"
    pattern = When(Call(aten.cat.default), _has_empty_parts)

    def rewrite(self, program: Program, match: Match) -> Node:
        arguments = bound_arguments(match.root)
        parts = [p for p in arguments["tensors"] if not _is_empty(program, p)]
        return (
            parts[0] if len(parts) == 1 else program.call(aten.cat.default, parts, arguments["dim"], where=match.where)
        )


class RemoveNoops(RewritePass):
    """Removes calls that don't change their input: copies, casts to the same type, dropout, ``x * 1``, and views that
    cancel out.

    Splits become slices, and adjacent slices that are joined again become one.
    """

    name = "remove_noops"
    rules: ClassVar[tuple[Rule, ...]] = (
        DropCast(),
        DropCopy(),
        DropDropout(),
        DropNeutral(),
        DropView(),
        JoinViews(),
        CancelTransposes(),
        CancelUnsqueeze(),
        SplitToSlices(),
        DropEmptyParts(),
        JoinSlices(),
    )
