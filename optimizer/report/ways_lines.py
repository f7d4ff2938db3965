"""Which ways to few bytes an export compared, in lines."""

from __future__ import annotations

from . import numbers
from .document import ReportDocument


def ways_lines(document: ReportDocument) -> list[str]:
    """One for each way, the one that was taken first; none if there was nothing to compare."""
    lines = []
    for way in sorted(document.ways, key=lambda way: not way.taken):
        if way.bytes is None or way.measured_kl is None:
            lines.append(f"{way.name}: {way.reason}")
            continue
        shapes = f", of which {numbers.significant(way.shapes_kl)} for its shape" if way.shapes_kl else ""
        kl = f"KL {numbers.significant(way.measured_kl)}{shapes}"
        lines.append(f"{way.name}: {numbers.format_bytes(way.bytes)}, {kl}" + (" (taken)" if way.taken else ""))
    return lines
