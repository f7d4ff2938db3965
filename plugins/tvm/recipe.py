"""The table [tvm] of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from enginewright.passes.formats.section import Section

from ..gpu.recipe import known_gpus
from ..steps.x86_levels import LevelName, levels_in_order
from .section import KernelsName


class TvmOptions(Section):
    """The recipe's options for the target tvm.

    Attributes:
        levels: the levels of x86-64 for which libraries are compiled. The best one that the CPU supports is run.
        kernels: "enginewright" if products and attention are the cpu target's kernels, which the libraries call. None
            if TVM compiles all.
        cuda: the compute capabilities of GPUs for which kernels are written, as files that Enginewright can't run.
    """

    kernels: KernelsName | None = None
    cuda: tuple[str, ...] = ()
    levels: Annotated[tuple[LevelName, ...], Field(min_length=1)] = ("v3", "v4-vnni")

    _in_order = field_validator("levels")(levels_in_order)
    _gpus_are_known = field_validator("cuda")(known_gpus)


TABLE = TvmOptions
