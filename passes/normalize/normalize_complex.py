"""Rewrites rotary embedding with complex numbers to products and sums of real numbers."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import Bind, Call, Match, Pattern, RewritePass, Rule
from enginewright.passes.framework.views import RESHAPES

from ..ir.program import Program

aten = torch.ops.aten

_VIEWS = (aten.unsqueeze.default, aten.slice.Tensor, aten.select.int, aten.expand.default)
"""Ops that may be between a table of complex numbers and its use. They have the same effect on the tables of cosines
and sines.
"""


class ComplexRotation(Rule):
    """Replaces view_as_real(view_as_complex(pairs of x) * polar(1, angle)) by real products, stacked as pairs.

    The table polar(1, angle) may be multiplied by numbers, and viewed with other dimensions, before it is used.
    """

    name = "complex_rotation"
    pattern: ClassVar[Pattern] = Call(
        aten.view_as_real.default,
        Call(aten.mul.Tensor, Call(aten.view_as_complex.default, Call(RESHAPES, Bind("x"))), Bind("table")),
    )

    def check(self, program: Program, match: Match) -> str | None:
        if _table(match.node("table")) is None:
            return "the factor isn't a table of complex numbers of length 1"
        x, result = program.shape(match.node("x")), program.shape(match.root)
        if tuple(result) != (*x[:-1], x[-1] / 2, 2):
            return "x is not seen as pairs of its last dimension"
        return None

    def rewrite(self, program: Program, match: Match) -> Node:
        x, where = match.node("x"), match.where
        table = _table(match.node("table"))
        assert table is not None  # check has seen to it
        angle, steps = table
        cos, sin = (_made(program, f, angle, steps) for f in (aten.cos.default, aten.sin.default))
        rank, size = program.value(x).dim(), int(program.shape(x)[-1])
        even, odd = (program.call(aten.slice.Tensor, x, rank - 1, i, size, 2, where=where) for i in (0, 1))

        def product(a: Node, b: Node) -> Node:
            return program.call(aten.mul.Tensor, a, b, where=where)

        first = program.call(aten.sub.Tensor, product(even, cos), product(odd, sin), where=where)
        second = program.call(aten.add.Tensor, product(odd, cos), product(even, sin), where=where)
        return program.call(aten.stack.default, [first, second], -1, where=where)


def _table(node: Node) -> tuple[Node, list[Node]] | None:
    """Returns the angle of polar(ones, angle), and the calls from there to ``node`` in order.

    None if ``node`` isn't computed from such a polar by views and multiplications by numbers.
    """
    steps: list[Node] = []
    while node.target is not aten.polar.default:
        numbered = node.target is aten.mul.Tensor and isinstance(node.args[1], (int, float))
        if not numbered and node.target not in _VIEWS:
            return None
        steps.append(node)
        source = node.args[0]
        if not isinstance(source, Node):
            return None
        node = source
    length, angle = node.args
    ones = isinstance(length, Node) and (
        length.target is aten.ones_like.default or (length.target is aten.full_like.default and length.args[1] == 1)
    )
    return (angle, steps[::-1]) if ones and isinstance(angle, Node) else None


def _made(program: Program, function: torch._ops.OpOverload, angle: Node, steps: list[Node]) -> Node:
    """Adds the real part (``function`` is cos) or the imaginary part (sin) of a complex table, and returns it.

    ``steps`` are the views and multiplications between polar and the table, which are repeated on the part.
    """
    last = steps[-1] if steps else angle
    value = program.call(function, angle, where=last.meta["where"])
    for step in steps:
        value = program.call(step.target, value, *step.args[1:], where=step.meta["where"], **step.kwargs)  # type: ignore[arg-type]
    return value


class NormalizeComplex(RewritePass):
    """Replaces products of pairs with complex numbers of length 1 by real products and sums."""

    name = "normalize_complex"
    rules: ClassVar[tuple[Rule, ...]] = (ComplexRotation(),)
