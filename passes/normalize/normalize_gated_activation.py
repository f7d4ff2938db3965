"""Replaces act(gate) * up by ``ew.gated_activation``, whose input is gate and up next to each other."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.aten_ops import activation_kind, ops_of
from enginewright.passes.framework.match import Bind, Call, Match, RewritePass, Rule
from enginewright.passes.framework.views import slice_bounds

from ..ir.program import Program

aten, ew = torch.ops.aten, torch.ops.ew

_ACTIVATIONS = ops_of("silu", "gelu", "relu", "sigmoid")


class GatedActivation(Rule):
    """Replaces act(gate) * up by one op, if gate and up are the two halves of one value, or two linears of the same
    value.
    """

    name = "gated_activation"
    pattern = Call(aten.mul.Tensor, Call(_ACTIVATIONS, Bind("gate")), Bind("up"))

    def check(self, program: Program, match: Match) -> str | None:
        gate, up = match.node("gate"), match.node("up")
        if program.shape(gate) != program.shape(up):
            return f"gate and up have the shapes {list(program.shape(gate))} and {list(program.shape(up))}"
        if _whole(program, gate, up) is not None:
            return None
        linears = [n for n in (gate, up) if n.target is ew.linear.default]
        if len(linears) < 2 or gate.args[0] is not up.args[0]:
            return "gate and up are neither the halves of one value nor linears of one value"
        return None

    def rewrite(self, program: Program, match: Match) -> Node:
        gate, up = match.node("gate"), match.node("up")
        kind = activation_kind(next(n for n in match.covered if n.target in _ACTIVATIONS))
        both = _whole(program, gate, up) or program.call(aten.cat.default, [gate, up], -1, where=match.where)
        return program.call(ew.gated_activation.default, both, kind, where=match.where)


def _whole(program: Program, gate: Node, up: Node) -> Node | None:
    """Returns the value whose first half along the last dimension is ``gate`` and whose second half is ``up``; None if
    there is none.
    """
    first, second = slice_bounds(program, gate), slice_bounds(program, up)
    if first is None or second is None or first[0] is not second[0]:
        return None
    rank, size = program.value(first[0]).dim(), program.shape(first[0])[-1]
    if not size.is_Integer:
        return None
    half = int(size) // 2
    halves = ((rank - 1, 0, half, 1), (rank - 1, half, int(size), 1))
    return first[0] if (first[1:], second[1:]) == halves else None


class NormalizeGatedActivation(RewritePass):
    """Replaces silu, gelu, gelu with tanh, relu or sigmoid of a gate times up by ``ew.gated_activation``."""

    name = "normalize_gated_activation"
    rules: ClassVar[tuple[Rule, ...]] = (GatedActivation(),)
