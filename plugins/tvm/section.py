"""The ``tvm`` section of a target's manifest: the libraries that there are, and how their function is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, field

from enginewright.runtime.shared.lowered_program import LoweredProgram, WeightUse
from enginewright.runtime.shared.records import Record, Sha256

STEP = "step"
"""The function of a library that runs a step."""

RUN_STEP = "enginewright.run_step"
"""The function that a library calls for a step of the program that runs by our kernels; its argument is which."""

OURS = frozenset({"linear", "quantized_linear", "grouped_linear", "quantized_grouped_linear", "paged_attention"})
"""Ops of which there are kernels of ours to call."""

KernelsName = Literal["enginewright"]
LevelName = Literal["v2", "v3", "v4", "v4-vnni"]


class TunedLibrary(Record, frozen=True, kw_only=True):
    """What ``optimize tune`` compiled for a level: files of the target's folder, the library and its records."""

    library: str
    records: str


class TvmSection(Record, frozen=True, kw_only=True):
    """Beside the target's program.json.

    Attributes:
        version: of TVM, which made the libraries and must run them.
        levels: of x86-64 that there is a library for, the plainest first.
        program: SHA-256 of the program.json that the libraries were compiled from: with another one they would read
            and write elsewhere. None in older bundles.
        kernels: whose kernels products and attention are, if they aren't the library's own.
        cuda: compute capabilities that there are files for; nothing of ours runs them.
        tuned: by level, libraries that are run in the place of the exported ones.
    """

    version: str
    levels: Annotated[tuple[LevelName, ...], Meta(min_length=1)]
    program: Sha256 | None = None
    kernels: KernelsName | None = None
    cuda: tuple[str, ...] = ()
    tuned: dict[LevelName, TunedLibrary] = field(default_factory=dict)

    def library(self, level: LevelName) -> str:
        """The file of a level's library."""
        return self.tuned[level].library if level in self.tuned else library_name(level)


def library_name(level: str) -> str:
    """The file of a level's library, in the target's folder."""
    return f"step-{level}.so"


@dataclass(frozen=True)
class StepArguments:
    """What ``step`` is called with, in this order; of a cache its keys, then its values.

    Attributes:
        inputs: of a step, by their names in programs.
        arena: the types that the arena is given as.
        weights: by name; one tuple.
        caches: GROUP/LAYER; one tuple.
    """

    inputs: tuple[str, ...]
    arena: tuple[str, ...]
    weights: tuple[str, ...]
    caches: tuple[str, ...]


def arguments_of(program: LoweredProgram) -> StepArguments:
    """Those of a program's function."""
    groups = program.cache_groups
    return StepArguments(
        inputs=(
            *("ids", "positions", "rows", "q_start", "kv_len"),
            *(f"slots:{group.name}" for group in groups),
            *(f"block_table:{group.name}" for group in groups),
        ),
        arena=("float32", "int32", "int8", "uint16"),
        weights=tuple(use.name for use in program.weights),
        caches=tuple(f"{group.name}/{layer}" for group in groups for layer in group.layers),
    )


def stored_type(use: WeightUse) -> str:
    """What kernels read a weight's memory as: words of packed values, floats of 32 bits, integers, or their bits."""
    if use.layout in ("panel32x2", "panel32x4", "panel32x8", "sparse32"):
        return "int32"
    kinds = {"f32": "float32", "i32": "int32", "i8": "int8", "bf16": "uint16", "f16": "uint16", "fp8": "uint8"}
    return kinds.get(use.dtype, "uint8")


def best_level(levels: Sequence[LevelName], features: Sequence[str]) -> LevelName | None:
    """The last of ``levels`` whose instructions a processor has; None if it has none's."""
    here = set(features)
    fitting = [name for name in levels if FEATURES[name] <= here]
    return fitting[-1] if fitting else None


_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
FEATURES = {"v2": _V2, "v3": _V3, "v4": _V4, "v4-vnni": _V4 | {"avx512_vnni"}}
"""Level -> what Linux calls the instructions that it needs."""


@dataclass(frozen=True)
class Level:
    """A kind of processor that libraries are compiled for, and what a schedule takes from its registers.

    Attributes:
        name: in a recipe, and of its library in a bundle.
        cpu: what LLVM calls it.
        features: of LLVM, beside those of ``cpu``.
        rows, vectors: of the block of sums that a product keeps in registers: rows by vectors of 16 floats.
        vnni: whether it multiplies bytes by an instruction of its own.
        lanes: floats that loops handle at a time.
        grid: whether loops over rows are a grid of threads, of a GPU.
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
        """Whose kernels they are, for messages."""
        return "the tvm target on a GPU" if self.grid else "the tvm target"

    @property
    def without(self) -> str:
        """What to do without a kernel."""
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
"""The plainest first; every one runs on the processors of those behind it."""

SECTIONS = {"tvm": TvmSection}
ANY_SIZE = True
