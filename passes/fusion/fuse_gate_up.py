"""Fuses the gate and up projections of a gated MLP into one linear, whose whole result the activation reads."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.match import Anything, Bind, Call, Match, RewritePass, Rule, bound_arguments

from ..ir.program import Program
from .concat_linears import stack_linears, why_kept_apart, why_not_stackable

aten, ew = torch.ops.aten, torch.ops.ew


class GateUp(Rule):
    """Replaces gated_activation(cat(linear(x, gate), linear(x, up))) by gated_activation of one linear with stacked
    weights.
    """

    name = "gate_up"

    def __init__(self, keep_blocks: bool = False) -> None:
        self.keep_blocks = keep_blocks

    pattern = Call(
        ew.gated_activation.default,
        Call(aten.cat.default, [Bind("gate"), Bind("up")], Anything("dim")),
        Anything("kind"),
    )

    def check(self, program: Program, match: Match) -> str | None:
        linears = [match.node("gate"), match.node("up")]
        if any(n.target is not ew.linear.default for n in linears):
            return "gate and up are not both linears"
        if match.bound["dim"] % program.value(linears[0]).dim() != program.value(linears[0]).dim() - 1:
            return "gate and up are not side by side"
        if any(len(n.users) > 1 for n in linears):
            return "gate or up is used elsewhere"
        return why_not_stackable(program, linears) or (why_kept_apart(program, linears) if self.keep_blocks else None)

    def rewrite(self, program: Program, match: Match) -> Node:
        both = stack_linears(program, [match.node("gate"), match.node("up")])
        kind = bound_arguments(match.root)["kind"]
        return program.call(ew.gated_activation.default, both, kind, where=match.where)


class FuseGateUp(RewritePass):
    """Fuses gate and up into one ``ew.linear``."""

    name = "fuse_gate_up"
    rules: ClassVar[tuple[Rule, ...]] = (GateUp(),)

    def rules_for(self, context: PassContext) -> tuple[Rule, ...]:
        """Returns ``rules``. If the recipe keeps blocks, the rule leaves weights apart that would lose their blocks
        when fused.
        """
        return (GateUp(keep_blocks=True),) if context.recipe.weights.keep_blocks else self.rules
