"""[cpu] of a recipe."""

from __future__ import annotations

from pydantic import field_validator

from enginewright.passes.formats.section import Section
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.shared.errors import RequestError


class CpuOptions(Section):
    """What the target cpu is given.

    Attributes:
        partitions: that the model must be fit for, such as "tensor=2" or "tensor=2,pipeline=2": an export of one that
            can't be cut so is an error. Ranks cut the program when they open the bundle, in these ways and any other.
    """

    partitions: tuple[str, ...] = ()

    @field_validator("partitions")
    @classmethod
    def _are_partitions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                Partition.parse(text)
            except RequestError as e:
                raise ValueError(f"{e.message}. {e.hint}") from e
        return value


TABLE = CpuOptions
