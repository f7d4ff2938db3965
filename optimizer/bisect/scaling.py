"""Channels of values that a pass has scaled on purpose (AWQ), as the weights before and behind them say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.fx.node import Node

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.scaled import Scaled
from enginewright.passes.ir.weights import WeightExpr
from enginewright.plugins.shared.contracts import FloatArray

from .points import Point
from .taps import ADDED_NORMS, LINEARS, NORMS, Call


@dataclass(frozen=True)
class Scaling:
    """What the value at a point, [T, N], is multiplied by, [N]; and points where it is scaled by nobody knows what."""

    scales: dict[Point, FloatArray] = field(default_factory=dict)
    unknown: set[Point] = field(default_factory=set)


def scaling_of(program: Program, calls: Sequence[Call]) -> Scaling:
    """What the weights of a program say: ``Scaled`` columns of a product undo the scale of its input, and ``Scaled``
    rows, or a norm's weight, make one."""
    found = Scaling()
    attending = {call.where[0] for call in calls if "attention" in call.op and call.where}
    for call in calls:
        assert isinstance(call.key, Node)
        if call.op not in LINEARS | NORMS | ADDED_NORMS:
            continue
        expr = program.weight_of(bound_arguments(call.key).get("weight"))
        for scaled in _scaled(expr):
            factors: FloatArray = scaled.factors.values.numpy()
            if scaled.divide:
                factors = np.reciprocal(factors)
            if call.op in LINEARS and factors.shape[0] == 1:  # columns
                for piece in call.pieces:
                    _put(found, Point(piece.path, "input"), np.reciprocal(factors[0]))
            elif call.op in LINEARS:
                for piece in call.pieces:
                    _put(found, Point(piece.path, "output"), factors[piece.start : piece.stop, 0])
            elif call.where:
                _put(found, Point(call.where[0], "output"), factors)
    for path in attending:  # its values are a linear's output and another's input, of which the scales are known
        if any(point.path.startswith(f"{path}.") for point in found.scales):
            found.unknown.update((Point(path, "value"), Point(path, "context")))
    return found


def _put(found: Scaling, point: Point, scale: FloatArray) -> None:
    if (scale != 1).any():
        before = found.scales.get(point)
        found.scales[point] = (scale if before is None else before * scale).astype(np.float32)


def _scaled(expr: WeightExpr | None) -> Iterator[Scaled]:
    while expr is not None:
        if isinstance(expr, Scaled):
            yield expr
        expr = getattr(expr, "base", None)
