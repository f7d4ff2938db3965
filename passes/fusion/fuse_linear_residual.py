"""Fuses a residual into the linear before it, which adds it while its sums are in registers."""

from __future__ import annotations

import operator
from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import Bind, Call, Match, RewritePass, Rule, bound_arguments

from ..ir.program import Program
from ..ir.provenance import WHERE, where_of
from .linear_epilogue import PLAIN_LINEARS, linear_of, why_no_epilogue, with_epilogue

aten, ew = torch.ops.aten, torch.ops.ew

_LINEAR = Call(PLAIN_LINEARS)
_ADD_NORMS = (ew.add_rms_norm.default, ew.add_layer_norm.default)


class _Residual(Rule):
    """The common part of the rules that fuse a linear and a residual: their conditions, and the fused linear."""

    def check(self, program: Program, match: Match) -> str | None:
        linear, residual = linear_of(match), match.node("residual")
        if (reason := why_no_epilogue(program, linear)) is not None:
            return reason
        if residual is linear:
            return "the linear is added to itself"
        if program.shape(residual) != program.shape(linear):
            return "one side of the sum is broadcast"
        if program.value(residual).dtype != program.value(linear).dtype:
            return "the sides of the sum have different types"
        return None

    def total(self, program: Program, match: Match) -> Node:
        """Adds the linear with the residual of the match, and returns it."""
        linear = linear_of(match)
        where = where_of([linear, match.root])
        return with_epilogue(program, linear, where, residual=match.node("residual"))


class LinearAdd(_Residual):
    """Replaces linear(x) + residual by linear(x, residual)."""

    name = "linear_add"
    pattern = Call(aten.add.Tensor, _LINEAR, Bind("residual"), alpha=1)

    def rewrite(self, program: Program, match: Match) -> Node:
        return self.total(program, match)


class LinearAddNorm(_Residual):
    """Replaces add_norm(linear(x), residual) by norm(linear(x, residual)). Readers of the sum read that linear."""

    name = "linear_add_norm"
    pattern = Call(_ADD_NORMS, _LINEAR, Bind("residual")) | Call(_ADD_NORMS, Bind("residual"), _LINEAR)

    def rewrite(self, program: Program, match: Match) -> Node:
        root = match.root
        total = self.total(program, match)
        target = ew.rms_norm.default if root.target is ew.add_rms_norm.default else ew.layer_norm.default
        parameters = [v for k, v in bound_arguments(root).items() if k not in ("x", "residual")]
        normed = program.call(target, total, *parameters, where=root.meta[WHERE])
        for user in list(root.users):
            assert user.target is operator.getitem
            program.replace(user, total if user.args[1] else normed)
        return root  # which nothing reads any more


class FuseLinearResidual(RewritePass):
    """Replaces the sum of a linear's result and another value by a linear with a residual. A fused norm of the sum
    becomes a plain norm.
    """

    name = "fuse_linear_residual"
    rules: ClassVar[tuple[Rule, ...]] = (LinearAdd(), LinearAddNorm())
