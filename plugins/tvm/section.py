"""The ``tvm`` section of a target's manifest: its libraries, and the arguments of their functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, field

from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.lowered_program import LoweredProgram, WeightUse
from enginewright.runtime.shared.records import Record, Sha256
from enginewright.runtime.shared.step_schema import (
    BLOCK_TABLE,
    IDS,
    KV_LEN,
    POSITIONS,
    Q_START,
    ROWS,
    SLOTS,
    group_port,
)

from ..steps.x86_levels import LevelName

STEP = "step"
"""The name of a library's function that runs a step."""

STEP_WITH_TAPS = "step_with_taps"
"""The name of the function that also writes the rows of hidden states (``hidden_taps.with_tap_outputs``). Older
libraries don't have it.
"""

RUN_STEP = "enginewright.run_step"
"""The name of the function that a library calls to run a step of the program by the cpu target's kernels. Its argument
is the step's index.
"""

OURS = frozenset({"linear", "quantized_linear", "grouped_linear", "quantized_grouped_linear", "paged_attention"})
"""Ops that a library can run by the cpu target's kernels."""

KernelsName = Literal["enginewright"]


class TunedLibrary(Record, frozen=True, kw_only=True):
    """The files that ``optimize tune`` compiled for a level, in the target's folder: the library and its records."""

    library: str
    records: str


class TvmSection(Record, frozen=True, kw_only=True):
    """The target's section in a bundle's manifest, in addition to its program.json.

    Attributes:
        version: the version of TVM that compiled the libraries, and the only one that can run them.
        levels: the levels of x86-64 with a library, the lowest first.
        program: the SHA-256 of the program.json from which the libraries were compiled, since their memory accesses
            depend on it. None in older bundles.
        kernels: "enginewright" if products and attention run by the cpu target's kernels; None if by the library.
        cuda: the compute capabilities with CUDA files, which Enginewright can't run.
        tuned: level -> the library of ``optimize tune`` that replaces the exported one.
    """

    version: str
    levels: Annotated[tuple[LevelName, ...], Meta(min_length=1)]
    program: Sha256 | None = None
    kernels: KernelsName | None = None
    cuda: tuple[str, ...] = ()
    tuned: dict[LevelName, TunedLibrary] = field(default_factory=dict)

    def library(self, level: LevelName) -> str:
        """Returns the file of a level's library, in the target's folder; a tuned one if there is one."""
        return self.tuned[level].library if level in self.tuned else library_name(level)


def library_name(level: str) -> str:
    """Returns the file of a level's exported library, in the target's folder."""
    return f"step-{level}.so"


@dataclass(frozen=True)
class StepArguments:
    """The names of the arguments of ``step``, in this order. A cache is two arguments: its keys, then its values.

    Attributes:
        inputs: the inputs of a step, by their names in programs.
        arena: the types as which the arena is passed.
        weights: the names of the weights, passed as one tuple.
        caches: the caches as GROUP/LAYER, passed as one tuple.
    """

    inputs: tuple[str, ...]
    arena: tuple[str, ...]
    weights: tuple[str, ...]
    caches: tuple[str, ...]


def arguments_of(program: LoweredProgram) -> StepArguments:
    """Returns the arguments of a program's function, in the order that libraries of all versions have."""
    groups = program.cache_groups
    return StepArguments(
        inputs=(
            *(IDS, POSITIONS, ROWS, Q_START, KV_LEN),
            *(group_port(port, group.name) for port in (SLOTS, BLOCK_TABLE) for group in groups),
            *program.ports,
        ),
        arena=("float32", "int32", "int8", "uint16"),
        weights=tuple(use.name for use in program.weights),
        caches=tuple(f"{group.name}/{layer}" for group in groups for layer in group.layers),
    )


def stored_type(use: WeightUse) -> str:
    """Returns the type as which kernels read a weight: words of packed values, 32-bit floats, integers, or their
    bits.
    """
    if use.layout in ("panel32x2", "panel32x4", "panel32x8", "sparse32"):
        return "int32"
    return DTYPES[use.dtype].tvm


SECTIONS = {"tvm": TvmSection}
