"""What quantizing did to a program's weights beyond rounding, for the report of an export."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..ir.quantized import QuantizationCounts, QuantizedValues
from ..ir.weights import WeightExpr


@dataclass(frozen=True)
class AffectedWeight:
    """A weight of which values were clamped, or groups of small ones became zero; see ``QuantizationCounts``."""

    name: str
    saturated: int
    vanished: int


@dataclass(frozen=True)
class QuantizationReport:
    """All weights of a program that became integers together, and those that rounding did more to than round.

    ``values`` counts weights; ``saturated`` those of 8 bits that were clamped; ``vanished`` groups that became zero, or
    one number; ``kept`` weights that are the integers of the source, bit for bit.
    """

    values: int
    saturated: int
    vanished: int
    affected: tuple[AffectedWeight, ...]
    kept: int = 0


def quantization_report(weights: Iterable[tuple[str, WeightExpr]]) -> QuantizationReport | None:
    """The counts of the weights that have been evaluated, by name; None if nothing was quantized."""
    counts: list[tuple[str, QuantizationCounts]] = []
    for name, expr in weights:
        if isinstance(expr, QuantizedValues) and expr.counts is not None:
            counts.append((name, expr.counts))
    if not counts:
        return None
    return QuantizationReport(
        values=sum(c.values for _, c in counts),
        saturated=sum(c.saturated for _, c in counts),
        vanished=sum(c.vanished for _, c in counts),
        affected=tuple(AffectedWeight(n, c.saturated, c.vanished) for n, c in counts if c.saturated or c.vanished),
        kept=sum(c.kept for _, c in counts),
    )
