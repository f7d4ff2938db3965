"""The ``tvm`` section of a target's manifest: the libraries that there are, and how their function is called."""

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
"""The function of a library that runs a step."""

STEP_WITH_TAPS = "step_with_taps"
"""The one that also writes the rows of hidden states: see ``hidden_taps.with_tap_outputs``. Older libraries lack it."""

RUN_STEP = "enginewright.run_step"
"""The function that a library calls for a step of the program that runs by our kernels; its argument is which."""

OURS = frozenset({"linear", "quantized_linear", "grouped_linear", "quantized_grouped_linear", "paged_attention"})
"""Ops of which there are kernels of ours to call."""

KernelsName = Literal["enginewright"]


class TunedLibrary(Record, frozen=True, kw_only=True):
    """The files that ``optimize tune`` compiled for a level, in the target's folder: the library and its records."""

    library: str
    records: str


class TvmSection(Record, frozen=True, kw_only=True):
    """The target's section in a bundle's manifest, besides its program.json.

    Attributes:
        version: the version of TVM that made the libraries; only the same can run them.
        levels: levels of x86-64 with a library, the lowest first.
        program: SHA-256 of the program.json that the libraries were compiled from, since their memory accesses depend
            on it. None in older bundles.
        kernels: the owner of the kernels of products and attention; None for the library itself.
        cuda: compute capabilities with CUDA files, which Enginewright can't run.
        tuned: by level, a library that replaces the exported one.
    """

    version: str
    levels: Annotated[tuple[LevelName, ...], Meta(min_length=1)]
    program: Sha256 | None = None
    kernels: KernelsName | None = None
    cuda: tuple[str, ...] = ()
    tuned: dict[LevelName, TunedLibrary] = field(default_factory=dict)

    def library(self, level: LevelName) -> str:
        """Returns the file of a level's library."""
        return self.tuned[level].library if level in self.tuned else library_name(level)


def library_name(level: str) -> str:
    """Returns the file of a level's library, in the target's folder."""
    return f"step-{level}.so"


@dataclass(frozen=True)
class StepArguments:
    """The arguments of ``step``, in this order; a cache has its keys, then its values.

    Attributes:
        inputs: inputs of a step, by their names in programs.
        arena: the types that the arena is passed as.
        weights: names of weights; one tuple.
        caches: caches as GROUP/LAYER; one tuple.
    """

    inputs: tuple[str, ...]
    arena: tuple[str, ...]
    weights: tuple[str, ...]
    caches: tuple[str, ...]


def arguments_of(program: LoweredProgram) -> StepArguments:
    """Returns those of a program's function, in the order that libraries have always had."""
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
    """Returns the type that kernels read a weight as: words of packed values, floats of 32 bits, integers, or their
    bits."""
    if use.layout in ("panel32x2", "panel32x4", "panel32x8", "sparse32"):
        return "int32"
    return DTYPES[use.dtype].tvm


SECTIONS = {"tvm": TvmSection}
