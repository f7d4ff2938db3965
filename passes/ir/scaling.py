"""Finds by which factors passes such as AWQ have scaled the channels of a program's values, and which values are
rotated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from torch.fx.node import Node

from enginewright.runtime.shared.contracts import FloatArray

from .calls import ADDED_NORMS, LINEARS, NORMS, Call, bound_arguments
from .program import Program
from .scaled import Rotated, Scaled
from .value_name import ValueName
from .weights import WeightExpr

Expr = TypeVar("Expr", bound=WeightExpr)


@dataclass(frozen=True)
class Scaling:
    """The scales and rotations of a program's values, compared with the source model's.

    Attributes:
        scales: the factors [N] of each scaled value [T, N].
        unknown: changed values whose factors are unknown, such as rotated ones.
        rotations: the block size of each value that was rotated (before it was scaled).
    """

    scales: dict[ValueName, FloatArray] = field(default_factory=dict)
    unknown: set[ValueName] = field(default_factory=set)
    rotations: dict[ValueName, int] = field(default_factory=dict)

    def multiply(self, name: ValueName, factors: FloatArray) -> None:
        """Multiplies the recorded factors of a value by ``factors`` [N]. Factors that are all 1 are ignored."""
        if (factors != 1).any():
            before = self.scales.get(name)
            self.scales[name] = (factors if before is None else before * factors).astype(np.float32)


def scaling_of(program: Program, calls: Sequence[Call]) -> Scaling:
    """Returns the scales and rotations of a program's values, read from the expressions of its weights.

    ``calls`` are the program's calls. ``Scaled`` columns of a product's weight undo the scale of its input. ``Scaled``
    rows of it, or a scaled norm's weight, scale the output.
    """
    scaling = Scaling()
    for call in calls:
        if call.op in LINEARS:
            expr = _weight(program, call)
            _add_rotations(scaling, call, expr)
            _add_scales(scaling, call, expr)
        elif call.op in NORMS | ADDED_NORMS and call.where:
            for factors in _factors(_weight(program, call)):
                scaling.multiply(ValueName(call.where[0], "output"), factors)
    # An attention's values are the output of one linear and the input of another: the scales of those are known.
    for path in {call.where[0] for call in calls if "attention" in call.op and call.where}:
        if any(name.path.startswith(f"{path}.") for name in (*scaling.scales, *scaling.rotations)):
            scaling.unknown.update((ValueName(path, "value"), ValueName(path, "context")))
    scaling.unknown.update(scaling.rotations)
    return scaling


def _add_rotations(scaling: Scaling, call: Call, expr: WeightExpr | None) -> None:
    for rotated in _within(Rotated, expr):
        columns = rotated.axis == -1
        for piece in call.pieces:
            if columns or rotated.start <= piece.start < rotated.stop:
                scaling.rotations[ValueName(piece.path, "input" if columns else "output")] = rotated.size


def _add_scales(scaling: Scaling, call: Call, expr: WeightExpr | None) -> None:
    for factors in _factors(expr):
        columns = factors.shape[0] == 1
        for piece in call.pieces:
            if columns:
                scaling.multiply(ValueName(piece.path, "input"), np.reciprocal(factors[0]))
            else:
                scaling.multiply(ValueName(piece.path, "output"), factors[piece.start : piece.stop, 0])


def _factors(expr: WeightExpr | None) -> Iterator[FloatArray]:
    """Yields the factors of every ``Scaled`` among an expression and its bases, as arrays of the weight's rank."""
    for scaled in _within(Scaled, expr):
        factors: FloatArray = scaled.factors.values.numpy()
        yield np.reciprocal(factors) if scaled.divide else factors


def _weight(program: Program, call: Call) -> WeightExpr | None:
    assert isinstance(call.key, Node)
    return program.weight_of(bound_arguments(call.key).get("weight"))


def _within(kind: type[Expr], expr: WeightExpr | None) -> Iterator[Expr]:
    """Yields the expressions of class ``kind`` among a weight and its bases, outermost first."""
    while expr is not None:
        if isinstance(expr, kind):
            yield expr
        expr = getattr(expr, "base", None)
