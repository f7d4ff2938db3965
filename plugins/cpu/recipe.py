"""The table [cpu] of a recipe."""

from __future__ import annotations

from pydantic import field_validator

from enginewright.passes.formats.section import Section

from ..ranks.recipe import known_partitions


class CpuOptions(Section):
    """The recipe's options for the target cpu.

    Attributes:
        partitions: partitions that the model must support, such as "tensor=2" or "tensor=2,pipeline=2". The export
            fails if the model can't be partitioned so. A bundle isn't limited to them: ranks partition the program when
            they open it.
    """

    partitions: tuple[str, ...] = ()

    _are_partitions = field_validator("partitions")(known_partitions)


TABLE = CpuOptions
