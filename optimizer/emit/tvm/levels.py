"""The processors that kernels are compiled for: levels of x86-64, and what a schedule takes from their registers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Level:
    """A kind of processor.

    Attributes:
        name: in a recipe, and of its library in a bundle.
        cpu: what LLVM calls it.
        features: of LLVM, beside those of ``cpu``.
        rows, vectors: of the block of sums that a product keeps in registers: rows by vectors of 16 floats.
        vnni: whether it multiplies bytes by an instruction of its own.
    """

    name: str
    cpu: str
    features: tuple[str, ...]
    rows: int
    vectors: int
    vnni: bool = False


LEVELS: Mapping[str, Level] = {
    level.name: level
    for level in (
        Level("v2", "x86-64-v2", (), 2, 1),
        Level("v3", "x86-64-v3", (), 6, 1),
        Level("v4", "x86-64-v4", ("-prefer-256-bit",), 12, 2),
        Level("v4-vnni", "x86-64-v4", ("-prefer-256-bit", "+avx512vnni"), 12, 2, vnni=True),
    )
}
"""The plainest first; every one runs on the processors of those behind it."""
