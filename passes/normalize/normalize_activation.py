"""Replaces activations that are composed of several ops by one ATen op each."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import Bind, Call, Match, Number, Pattern, RewritePass, Rule

from ..ir.program import Program

aten = torch.ops.aten

# Spelled-out constants are rounded at will: 0.79788456, 0.7978845608028654, sqrt(2 / pi).
_TOLERANCE = 1e-6


class Silu(Rule):
    """Replaces x * sigmoid(x) by ``aten.silu``."""

    name = "silu"
    pattern = Call(aten.mul.Tensor, Bind("x"), Call(aten.sigmoid.default, Bind("x")))

    def rewrite(self, program: Program, match: Match) -> Node:
        return program.call(aten.silu.default, match.node("x"), where=match.where)


def _half_x_times(factor: Pattern) -> Pattern:
    """Returns the pattern of x/2 * (factor + 1), with the products in any order."""
    x: Pattern = Bind("x")
    more = Call(aten.add.Tensor, factor, 1)
    half = Call(aten.mul.Tensor, x, 0.5)
    return (
        Call(aten.mul.Tensor, half, more)
        | Call(aten.mul.Tensor, x, Call(aten.mul.Tensor, more, 0.5))
        | Call(aten.mul.Tensor, Call(aten.mul.Tensor, x, more), 0.5)
    )


_X = Bind("x")
_SQUARE: Pattern = Call(aten.mul.Tensor, _X, _X) | Call(aten.pow.Tensor_Scalar, _X, 2)
_CUBE: Pattern = Call(aten.pow.Tensor_Scalar, _X, 3) | Call(aten.mul.Tensor, _X, _SQUARE)
_C_TIMES_X = Call(aten.mul.Tensor, _X, Number("cubic"))
_CUBIC: Pattern = Call(aten.mul.Tensor, _CUBE, Number("cubic")) | Call(aten.mul.Tensor, _C_TIMES_X, _SQUARE)
_QUADRATIC: Pattern = Call(aten.mul.Tensor, _SQUARE, Number("cubic")) | Call(aten.mul.Tensor, _C_TIMES_X, _X)
# slope * (x + cubic x^3), and slope * x * (1 + cubic x^2)
_INNER: Pattern = Call(aten.mul.Tensor, Call(aten.add.Tensor, _X, _CUBIC, alpha=1), Number("slope")) | Call(
    aten.mul.Tensor, Call(aten.mul.Tensor, _X, Number("slope")), Call(aten.add.Tensor, _QUADRATIC, 1)
)


class GeluTanh(Rule):
    """Replaces x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) by ``aten.gelu`` with tanh (Hendrycks and Gimpel,
    https://arxiv.org/abs/1606.08415).
    """

    name = "gelu_tanh"
    pattern = _half_x_times(Call(aten.tanh.default, _INNER))

    def check(self, program: Program, match: Match) -> str | None:
        return _differs(match, slope=math.sqrt(2 / math.pi), cubic=0.044715)

    def rewrite(self, program: Program, match: Match) -> Node:
        return program.call(aten.gelu.default, match.node("x"), where=match.where, approximate="tanh")


class Gelu(Rule):
    """Replaces x/2 * (1 + erf(x / sqrt(2))) by ``aten.gelu``."""

    name = "gelu"
    pattern = _half_x_times(
        Call(aten.erf.default, Call(aten.div.Tensor, Bind("x"), Number("divisor")))
        | Call(aten.erf.default, Call(aten.mul.Tensor, Bind("x"), Number("factor")))
    )

    def check(self, program: Program, match: Match) -> str | None:
        return _differs(match, divisor=math.sqrt(2), factor=math.sqrt(0.5))

    def rewrite(self, program: Program, match: Match) -> Node:
        return program.call(aten.gelu.default, match.node("x"), where=match.where)


def _differs(match: Match, **expected: float) -> str | None:
    for name, value in expected.items():
        constant: Any = match.get(name)
        if constant is not None and not math.isclose(constant, value, rel_tol=_TOLERANCE):
            return f"has {constant} where GELU has {value:.7g}"
    return None


class NormalizeActivation(RewritePass):
    """Replaces spelled-out SiLU by ``aten.silu``, and both forms of GELU by ``aten.gelu``."""

    name = "normalize_activation"
    rules: ClassVar[tuple[Rule, ...]] = (Silu(), GeluTanh(), Gelu())
