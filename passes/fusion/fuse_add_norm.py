"""Fuses a residual sum and its norm into one op, so that the sum is still in the CPU's cache when it is normalised."""

from __future__ import annotations

import operator
from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import Anything, Bind, Call, Match, Number, RewritePass, Rule

from ..ir.program import Program
from ..ir.provenance import WHERE, where_of

aten, ew = torch.ops.aten, torch.ops.ew

_SUM = Call(aten.add.Tensor, Bind("x"), Bind("residual"), alpha=1)


class _AddNorm(Rule):
    """Replaces norm(x + residual) by add_norm(x, residual) at the position of the sum.

    Other readers of the sum read the op's second result.
    """

    parameters: ClassVar[tuple[str, ...]]
    target: ClassVar[torch._ops.OpOverload]

    def check(self, program: Program, match: Match) -> str | None:
        total = next(n for n in match.covered if n.target is aten.add.Tensor)
        values = [program.value(match.node(name)) for name in ("x", "residual")]
        if any(program.shape(match.node(n)) != program.shape(total) for n in ("x", "residual")):
            return "one side of the sum is broadcast"
        if any(v.dtype != program.value(total).dtype for v in values):
            return "the sides of the sum have different types"
        if any(isinstance(p := match.get(n), Node) and p.op != "get_attr" for n in self.parameters):
            return "a weight of the norm is computed from the inputs"
        return None

    def rewrite(self, program: Program, match: Match) -> Node:
        total = next(n for n in match.covered if n.target is aten.add.Tensor)
        parameters = [match.get(n) for n in self.parameters]
        # Before the sum, not before the norm: what else reads the sum may come between them.
        with program.inserting_before(total):
            both = program.call(
                self.target,
                match.node("x"),
                match.node("residual"),
                *parameters,
                match.bound["eps"],
                where=where_of([match.root, total]),
            )
            normed = program.call(operator.getitem, both, 0, where=match.root.meta[WHERE])
            new_total = program.call(operator.getitem, both, 1, where=total.meta[WHERE])
        program.replace(total, new_total)
        return normed


class AddRmsNorm(_AddNorm):
    """Replaces rms_norm(x + residual) by add_rms_norm(x, residual)."""

    name = "add_rms_norm"
    pattern = Call(ew.rms_norm.default, _SUM, Anything("weight"), Number("eps"))
    parameters = ("weight",)
    target = ew.add_rms_norm.default


class AddLayerNorm(_AddNorm):
    """Replaces layer_norm(x + residual) by add_layer_norm(x, residual)."""

    name = "add_layer_norm"
    pattern = Call(ew.layer_norm.default, _SUM, Anything("weight"), Anything("bias"), Number("eps"))
    parameters = ("weight", "bias")
    target = ew.add_layer_norm.default


class FuseAddNorm(RewritePass):
    """Replaces a sum and its norm by ``ew.add_rms_norm`` or ``ew.add_layer_norm``. A second norm of the same sum
    stays.
    """

    name = "fuse_add_norm"
    rules: ClassVar[tuple[Rule, ...]] = (AddRmsNorm(), AddLayerNorm())
