"""Levels of x86-64 for which libraries and modules are compiled ahead of time, and the level of a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

LevelName = Literal["v2", "v3", "v4", "v4-vnni"]


def best_level(levels: Sequence[LevelName], features: Sequence[str]) -> LevelName | None:
    """Returns the last of ``levels`` whose instructions a CPU has; None if there is none.

    ``features`` are the CPU's instruction-set flags.
    """
    here = set(features)
    fitting = [name for name in levels if FEATURES[name] <= here]
    return fitting[-1] if fitting else None


_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
FEATURES = {"v2": _V2, "v3": _V3, "v4": _V4, "v4-vnni": _V4 | {"avx512_vnni"}}
"""Level -> the instruction-set flags that it needs, with Linux's names."""


@dataclass(frozen=True)
class Level:
    """A kind of processor for which kernels are compiled, with limits of its registers for schedules.

    Attributes:
        name: the level's name in a recipe, and of its library in a bundle.
        cpu: LLVM's name of the processor.
        features: LLVM's features in addition to those of ``cpu``.
        rows, vectors: the block of sums that a product keeps in registers: rows by vectors of 16 floats.
        vnni: True if it has an instruction that multiplies bytes.
        lanes: the number of floats that loops process at a time.
        grid: True if loops over rows become a grid of GPU threads.
    """

    name: str
    cpu: str
    features: tuple[str, ...]
    rows: int
    vectors: int
    vnni: bool = False
    lanes: int = 16
    grid: bool = False

    @property
    def owner(self) -> str:
        """The name of the target whose kernels these are, for messages."""
        return "the tvm target on a GPU" if self.grid else "the tvm target"

    @property
    def without(self) -> str:
        """The hint for an error about a missing kernel."""
        if self.grid:
            return "Leave `cuda` out of the recipe's [tvm], or take --target cuda."
        return "Use --target cpu, or a recipe that doesn't need it."


LEVELS: Mapping[str, Level] = {
    level.name: level
    for level in (
        Level("v2", "x86-64-v2", (), 2, 1),
        Level("v3", "x86-64-v3", (), 6, 1),
        Level("v4", "x86-64-v4", ("-prefer-256-bit",), 12, 2),
        Level("v4-vnni", "x86-64-v4", ("-prefer-256-bit", "+avx512vnni"), 12, 2, vnni=True),
    )
}
"""The levels by name, in ascending order. A library of one level also runs on CPUs of later levels."""


def levels_in_order(value: tuple[LevelName, ...]) -> tuple[LevelName, ...]:
    """Returns the levels in ascending order, each once."""
    return tuple(sorted(set(value), key=list(FEATURES).index))
