"""Replaces every spelling of RMSNorm and LayerNorm by ``ew.rms_norm`` and ``ew.layer_norm``.

The rules build on each other. First x * rsqrt(mean(x^2) + eps) becomes a norm without weight. Then a product with a
weight [H] and a sum with a bias [H] become the norm's own weight and bias.
"""

from __future__ import annotations

import operator
from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import (
    Bind,
    Call,
    Match,
    Number,
    Pattern,
    RewritePass,
    Rule,
    Weight,
    bound_arguments,
)

from ..ir.program import Program

aten, ew = torch.ops.aten, torch.ops.ew


def _rms_norm_of(x: Pattern) -> Pattern:
    """Returns the pattern of x / sqrt(mean(x^2) + eps), in all its spellings."""
    square: Pattern = Call(aten.pow.Tensor_Scalar, x, 2) | Call(aten.mul.Tensor, x, x) | Call(aten.square.default, x)
    variance = Call(aten.add.Tensor, Call(aten.mean.dim, square, [-1], True), Number("eps"), alpha=1)
    root = Call(aten.sqrt.default, variance) | Call(aten.pow.Tensor_Scalar, variance, 0.5)
    inverse: Pattern = Call(aten.rsqrt.default, variance) | Call(aten.pow.Tensor_Scalar, variance, -0.5)
    inverse |= Call(aten.reciprocal.default, root)
    return Call(aten.mul.Tensor, x, inverse) | Call(aten.div.Tensor, x, root)


class PlainRmsNorm(Rule):
    """Replaces x / sqrt(mean(x^2) + eps) over the last dimension by ``ew.rms_norm``."""

    name = "plain_rms_norm"
    pattern = _rms_norm_of(Bind("x"))

    def check(self, program: Program, match: Match) -> str | None:
        dtype = program.value(match.node("x")).dtype
        return None if dtype.is_floating_point else f"x is {dtype}"

    def rewrite(self, program: Program, match: Match) -> Node:
        return program.call(ew.rms_norm.default, match.node("x"), None, float(match.bound["eps"]), where=match.where)


class WideRmsNorm(Rule):
    """Removes the casts around a norm of a 16-bit x that is computed in float32, as ``ew.rms_norm`` always does."""

    name = "wide_rms_norm"
    pattern = Call(
        aten._to_copy.default,
        Call(ew.rms_norm.default, Call(aten._to_copy.default, Bind("x")), None, Number("eps")),
    )

    def check(self, program: Program, match: Match) -> str | None:
        old, new = program.value(match.node("x")).dtype, program.value(match.root).dtype
        wide = program.value(match.root.args[0]).dtype  # type: ignore[arg-type]
        if old != new:
            return f"takes {old} and gives {new}"
        return None if wide == torch.float32 and old.itemsize == 2 else f"computes {old} in {wide}"

    def rewrite(self, program: Program, match: Match) -> Node:
        return program.call(ew.rms_norm.default, match.node("x"), None, match.bound["eps"], where=match.where)


class PlainLayerNorm(Rule):
    """Replaces the RMSNorm of x - mean(x) by ``ew.layer_norm``."""

    name = "plain_layer_norm"
    pattern = _rms_norm_of(Call(aten.sub.Tensor, Bind("x"), Call(aten.mean.dim, Bind("x"), [-1], True), alpha=1))

    def rewrite(self, program: Program, match: Match) -> Node:
        return program.call(
            ew.layer_norm.default, match.node("x"), None, None, float(match.bound["eps"]), where=match.where
        )


class NormWeight(Rule):
    """Moves a multiplication by a weight into the norm before it."""

    name = "norm_weight"
    pattern = Call(aten.mul.Tensor, Call(ew.rms_norm.default, Bind("x"), None, Number("eps")), Weight("weight")) | Call(
        aten.mul.Tensor, Call(ew.layer_norm.default, Bind("x"), None, None, Number("eps")), Weight("weight")
    )

    def check(self, program: Program, match: Match) -> str | None:
        return _vector_problem(program, match, "weight")

    def rewrite(self, program: Program, match: Match) -> Node:
        x, weight, eps = match.node("x"), match.node("weight"), match.bound["eps"]
        if any(n.target is ew.layer_norm.default for n in match.covered):
            return program.call(ew.layer_norm.default, x, weight, None, eps, where=match.where)
        return program.call(ew.rms_norm.default, x, weight, eps, where=match.where)


class NormBias(Rule):
    """Moves an addition of a bias into the LayerNorm before it."""

    name = "norm_bias"
    pattern = Call(
        aten.add.Tensor,
        Call(ew.layer_norm.default, Bind("x"), Weight("weight"), None, Number("eps")),
        Weight("bias"),
        alpha=1,
    )

    def check(self, program: Program, match: Match) -> str | None:
        return _vector_problem(program, match, "bias")

    def rewrite(self, program: Program, match: Match) -> Node:
        weight, bias = match.node("weight"), match.node("bias")
        return program.call(ew.layer_norm.default, match.node("x"), weight, bias, match.bound["eps"], where=match.where)


class AtenRmsNorm(Rule):
    """Replaces aten.rms_norm, and the first result of aten._fused_rms_norm, by ``ew.rms_norm``."""

    name = "aten_rms_norm"
    pattern = Call(aten.rms_norm.default) | Call(operator.getitem, Call(aten._fused_rms_norm.default), 0)

    def check(self, program: Program, match: Match) -> str | None:
        return _last_only(match)

    def rewrite(self, program: Program, match: Match) -> Node:
        arguments = bound_arguments(_norm_call(match))
        x, eps = arguments["input"], arguments["eps"]
        if eps is None:  # torch's default is the dtype's epsilon
            eps = torch.finfo(program.value(x).dtype).eps
        return program.call(ew.rms_norm.default, x, arguments["weight"], float(eps), where=match.where)


class AtenLayerNorm(Rule):
    """Replaces aten.layer_norm, and the first result of aten.native_layer_norm, by ``ew.layer_norm``."""

    name = "aten_layer_norm"
    pattern = Call(aten.layer_norm.default) | Call(operator.getitem, Call(aten.native_layer_norm.default), 0)

    def check(self, program: Program, match: Match) -> str | None:
        return _last_only(match)

    def rewrite(self, program: Program, match: Match) -> Node:
        arguments = bound_arguments(_norm_call(match))
        x, weight, bias, eps = (arguments[k] for k in ("input", "weight", "bias", "eps"))
        return program.call(ew.layer_norm.default, x, weight, bias, float(eps), where=match.where)


def _vector_problem(program: Program, match: Match, name: str) -> str | None:
    size, shape = program.shape(match.node("x"))[-1], program.shape(match.node(name))
    return None if shape == (size,) else f"the {name} has the shape {list(shape)}, not [{size}]"


def _norm_call(match: Match) -> Node:
    call = match.root.args[0] if match.root.target is operator.getitem else match.root
    assert isinstance(call, Node)
    return call


def _last_only(match: Match) -> str | None:
    shape = bound_arguments(_norm_call(match))["normalized_shape"]
    return None if len(shape) == 1 else f"it is taken over the last {len(shape)} dimensions"


class NormalizeNorm(RewritePass):
    """Replaces norms over the last dimension by ``ew.rms_norm`` and ``ew.layer_norm``.

    A weight that isn't [H], such as one of [heads, D], stays a product after the norm.
    """

    name = "normalize_norm"
    rules: ClassVar[tuple[Rule, ...]] = (
        PlainLayerNorm(),
        PlainRmsNorm(),
        WideRmsNorm(),
        NormWeight(),
        NormBias(),
        AtenRmsNorm(),
        AtenLayerNorm(),
    )
