"""A gated activation and the quantization of its result become one op: the floats stay in the cache."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import Call, Match, RewritePass, Rule, bound_arguments

from ..ir.program import Program

ew = torch.ops.ew


class GatedQuantize(Rule):
    """quantize(gated_activation(x)) -> gated_activation_quantize(x)."""

    name = "gated_quantize"
    pattern = Call(ew.quantize_activation.default, Call(ew.gated_activation.default))

    def check(self, program: Program, match: Match) -> str | None:
        gated = match.root.args[0]
        assert isinstance(gated, Node)
        return "the activation's result is read by something else as well" if len(gated.users) > 1 else None

    def rewrite(self, program: Program, match: Match) -> Node:
        gated = match.root.args[0]
        assert isinstance(gated, Node)
        group = bound_arguments(match.root)["group_size"]
        given = bound_arguments(gated).values()
        return program.call(ew.gated_activation_quantize.default, *given, group, where=match.where)


class FuseGatedQuantize(RewritePass):
    """Gated activations whose result only ``ew.quantize_activation`` reads -> ones that quantize."""

    name = "fuse_gated_quantize"
    rules: ClassVar[tuple[Rule, ...]] = (GatedQuantize(),)
