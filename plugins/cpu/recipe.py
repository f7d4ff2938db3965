"""[cpu] of a recipe."""

from __future__ import annotations

from pydantic import field_validator

from enginewright.passes.formats.section import Section

from ..ranks.recipe import known_partitions


class CpuOptions(Section):
    """The recipe's options for the target cpu.

    Attributes:
        partitions: partitions that the model must allow, such as "tensor=2" or "tensor=2,pipeline=2": an export of a
            model that can't be cut so is an error. Ranks cut the program when they open the bundle, in these ways and
            any other.
    """

    partitions: tuple[str, ...] = ()

    _are_partitions = field_validator("partitions")(known_partitions)


TABLE = CpuOptions
