"""Reports the effects of quantizing a program's weights that go beyond rounding."""

from __future__ import annotations

from collections.abc import Iterable

from enginewright.passes.framework.records import AffectedWeight, QuantizationReport, StoredWeight

from ..ir.quantized import QuantizationCounts, QuantizedOffsets, QuantizedScales, QuantizedValues
from ..ir.weights import WeightExpr, sources_of


def already_quantized(weights: Iterable[tuple[str, WeightExpr]]) -> list[StoredWeight]:
    """Returns the weights that are stored quantized in the source, by name. The weights must have been evaluated."""
    stored = []
    for name, expr in weights:
        if isinstance(expr, QuantizedScales | QuantizedOffsets):
            continue
        kinds = dict.fromkeys(source.stored for source in sources_of(expr) if source.stored)
        if kinds:
            counts = expr.counts if isinstance(expr, QuantizedValues) else None
            unchanged = counts is not None and counts.kept == counts.values
            stored.append(StoredWeight(name, " and ".join(kinds), unchanged))
    return stored


def quantization_report(weights: Iterable[tuple[str, WeightExpr]]) -> QuantizationReport | None:
    """Returns the counts of the evaluated quantized weights, in total and by name; None if nothing was quantized."""
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
