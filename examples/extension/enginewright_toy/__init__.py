"""A pass that moves the constant factor of a linear's result into the linear's weight. Granite has such factors."""

from __future__ import annotations

from typing import ClassVar

import torch

from enginewright.passes.framework.match import Anything, Bind, Call, Match, Number, RewritePass, Rule, Weight
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Apply

aten, ew = torch.ops.aten, torch.ops.ew


class ScaledLinear(Rule):
    """linear(x, W) * c -> linear(x, c W): removes a step, so that other rules can fuse the linear."""

    name = "scaled_linear"
    linear = Call(ew.linear.default, Bind("x"), Weight("weight", rank=2), Anything("bias"))
    pattern = Call(aten.mul.Tensor, linear, Number("scale"))

    def check(self, program: Program, match: Match) -> str | None:
        linear = match.root.args[0]
        if match.get("bias") is not None:
            return "the linear has a bias, which would have to be scaled too"
        if len(match.node("weight").users) > 1:
            return "the weight is used elsewhere"
        return "the linear's result is used elsewhere" if len(linear.users) > 1 else None

    def rewrite(self, program: Program, match: Match) -> torch.fx.Node:
        node = match.node("weight")
        weight = program.weight_of(node)
        scaled = Apply(aten.mul.Tensor, (weight, match.bound["scale"]), (), weight.shape, weight.dtype)
        program.change_weight(node, scaled)  # computed when the bundle is written, not now
        return match.root.args[0]  # the linear replaces the product


class FoldScales(RewritePass):
    """Moves constant factors from the results of linears into their weights."""

    name = "fold_scales"
    after = "normalize_linear"  # the pass runs after this pass of the pipeline
    exact = True  # the pass may only cause rounding errors; the export measures them
    rules: ClassVar[tuple[Rule, ...]] = (ScaledLinear(),)
