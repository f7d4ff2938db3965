"""The formatting of numbers in reports."""

from __future__ import annotations

from enginewright.runtime.shared.memory import format_bytes

__all__ = ["count", "duration", "format_bytes", "gain", "of_limit", "of_machine", "percent", "rate", "significant"]

_THOUSANDS = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"))
_ROUNDS_UP = 0.9995
"""The share of a unit from which on the unit is used. 1000 of the smaller unit would print as "1e+03"."""


def significant(value: float, digits: int = 3) -> str:
    """Formats a number with ``digits`` significant digits: 0.00463, 20.6, 1.2e-07."""
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def count(value: float) -> str:
    """Formats a large number with a letter: 135 M, 1.2 G."""
    for size, letter in _THOUSANDS:
        if abs(value) >= _ROUNDS_UP * size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Formats seconds in a suitable unit: 37 us, 4.1 ms, 12.3 s, 3 min 20 s."""
    if seconds >= 100:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    if seconds >= _ROUNDS_UP:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= _ROUNDS_UP * 1e-3 else f"{seconds * 1e6:.3g} µs"


def percent(share: float) -> str:
    """Formats a share of 1: 96.0 %, 0.4 %."""
    return f"{share:.1%}".replace("%", " %")


def of_limit(share: float) -> str:
    """Formats a share of the machine's limit, "68 %"; "in cache" if it is larger than memory allows."""
    return f"{share:.0%}".replace("%", " %") if share < 1.005 else "in cache"


def of_machine(share: float) -> str:
    """Formats a share of the limit as a phrase: "68 % of this machine's limit"."""
    text = of_limit(share)
    return f"{text} of this machine's limit" if text.endswith("%") else f"{text}: faster than memory"


def gain(share: float) -> str:
    """Formats a relative saving with its sign: +3.1 %, −0.6 %, 0.0 %."""
    shown = f"{abs(share):.1%}".replace("%", " %")
    return shown if not round(share, 3) else f"{'+' if share > 0 else '−'}{shown}"


def rate(per_second: float) -> str:
    """Formats tokens per second: 61.2, 1,240."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.1f}"
