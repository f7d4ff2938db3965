"""Fuses an activation into the linear before it, which applies it while its sums are in registers."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.aten_ops import activation_kind, ops_of
from enginewright.passes.framework.match import Call, Match, RewritePass, Rule

from ..ir.program import Program
from .linear_epilogue import LINEARS, linear_of, why_no_epilogue, with_epilogue

aten = torch.ops.aten

_ACTIVATIONS = ops_of("silu", "gelu", "relu", "sigmoid", "tanh")
_WITH_RELU = Call(LINEARS, activation="relu")


class Activation(Rule):
    """Replaces activation(linear(x)) by a linear with that activation."""

    name = "activation"
    pattern = Call(_ACTIVATIONS, Call(LINEARS, activation=""))

    def check(self, program: Program, match: Match) -> str | None:
        return why_no_epilogue(program, linear_of(match))

    def rewrite(self, program: Program, match: Match) -> Node:
        return with_epilogue(program, linear_of(match), match.where, activation=activation_kind(match.root))


class SquaredRelu(Rule):
    """Replaces relu(linear(x))^2 by a linear with the activation relu2. The rule ``Activation`` has fused the relu
    before.
    """

    name = "squared_relu"
    pattern = Call(aten.pow.Tensor_Scalar, _WITH_RELU, 2) | Call(aten.mul.Tensor, _WITH_RELU, _WITH_RELU)

    def check(self, program: Program, match: Match) -> str | None:
        if len({n for n in match.covered if n.target in LINEARS}) > 1:
            return "it is a product of two linears' results"
        return why_no_epilogue(program, linear_of(match))

    def rewrite(self, program: Program, match: Match) -> Node:
        return with_epilogue(program, linear_of(match), match.where, activation="relu2")


class FuseLinearActivation(RewritePass):
    """Fuses linears, also those of experts, with the activation after them."""

    name = "fuse_linear_activation"
    rules: ClassVar[tuple[Rule, ...]] = (Activation(), SquaredRelu())
