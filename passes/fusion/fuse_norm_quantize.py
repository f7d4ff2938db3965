"""Fuses a norm and the quantization of its result into one op, which stores only the integers."""

from __future__ import annotations

import operator
from typing import ClassVar

import torch
from torch.fx.node import Node, Target

from enginewright.passes.framework.match import Call, Match, RewritePass, Rule, bound_arguments

from ..ir.program import Program
from ..ir.provenance import WHERE

ew = torch.ops.ew

_NORMS: dict[Target, torch._ops.OpOverload] = {
    ew.rms_norm.default: ew.rms_norm_quantize.default,
    ew.layer_norm.default: ew.layer_norm_quantize.default,
}
_ADD_NORMS: dict[Target, torch._ops.OpOverload] = {
    ew.add_rms_norm.default: ew.add_rms_norm_quantize.default,
    ew.add_layer_norm.default: ew.add_layer_norm_quantize.default,
}
_NORMED, _SUM = 0, 1
"""The indices of the results of a norm that adds a residual: the norm, and the sum."""
_FUSED_SUM = 3


class NormQuantize(Rule):
    """Replaces quantize(norm(x)) by norm_quantize(x)."""

    name = "norm_quantize"
    pattern = Call(ew.quantize_activation.default, Call(tuple(_NORMS)))

    def check(self, program: Program, match: Match) -> str | None:
        normed = match.root.args[0]
        assert isinstance(normed, Node)
        return "the norm's result is read by something else as well" if len(normed.users) > 1 else None

    def rewrite(self, program: Program, match: Match) -> Node:
        norm = next(n for n in match.covered if n.target in _NORMS)
        group = bound_arguments(match.root)["group_size"]
        return program.call(_NORMS[norm.target], *bound_arguments(norm).values(), group, where=match.where)


class AddNormQuantize(NormQuantize):
    """Replaces quantize(add_norm(x, residual)) by add_norm_quantize(x, residual), which returns the sum too."""

    name = "add_norm_quantize"
    pattern = Call(ew.quantize_activation.default, Call(operator.getitem, Call(tuple(_ADD_NORMS)), _NORMED))

    def rewrite(self, program: Program, match: Match) -> Node:
        norm = next(n for n in match.covered if n.target in _ADD_NORMS)
        group = bound_arguments(match.root)["group_size"]
        # Where the norm was: what reads the sum may come before the quantization.
        with program.inserting_before(norm):
            new = program.call(_ADD_NORMS[norm.target], *bound_arguments(norm).values(), group, where=match.where)
            total = program.call(operator.getitem, new, _FUSED_SUM, where=norm.meta[WHERE])
        for user in list(norm.users):
            if user.args[1] == _SUM:
                program.replace(user, total)
        return new


class FuseNormQuantize(RewritePass):
    """Fuses a norm with ``ew.quantize_activation`` if nothing else reads the norm's result."""

    name = "fuse_norm_quantize"
    rules: ClassVar[tuple[Rule, ...]] = (NormQuantize(), AddNormQuantize())
