"""Which candidates for the smallest bundle an export compared, in lines."""

from __future__ import annotations

from . import numbers
from .document import ReportDocument


def ways_lines(document: ReportDocument) -> list[str]:
    """One for each candidate, the one that was taken first; none if there was nothing to compare."""
    lines = []
    for candidate in sorted(document.ways, key=lambda c: not c.taken):
        if candidate.bytes is None or candidate.measured_kl is None:
            lines.append(f"{candidate.name}: {candidate.reason}")
            continue
        shapes = f", of which {numbers.significant(candidate.shapes_kl)} for its shape" if candidate.shapes_kl else ""
        kl = f"KL {numbers.significant(candidate.measured_kl)}{shapes}"
        lines.append(
            f"{candidate.name}: {numbers.format_bytes(candidate.bytes)}, {kl}" + (" (taken)" if candidate.taken else "")
        )
    return lines
