"""The records of passes for the report of an export. They don't import torch, because reports are read without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rejection:
    """A candidate that a rule rejected: the node, its module path, and the reason."""

    node: str
    where: str
    reason: str


@dataclass(frozen=True)
class Metric:
    """A number that a pass measured at one place of the model, such as a layer's relative error after rounding.

    ``where`` is the module path.
    """

    where: str
    name: str
    value: float


@dataclass(frozen=True)
class AffectedWeight:
    """A weight with clamped values or with groups whose scale became 0.

    Attributes:
        name: the weight's name.
        saturated: the number of values that were clamped.
        vanished: the number of groups whose scale became 0.
    """

    name: str
    saturated: int
    vanished: int


@dataclass(frozen=True)
class StoredWeight:
    """A weight that is stored in a quantized format in the source.

    Attributes:
        name: its name in the program.
        stored: the source's format.
        kept: True if the bundle has the source's own integers; False if they were dequantized and rounded anew.
    """

    name: str
    stored: str
    kept: bool


@dataclass(frozen=True)
class QuantizationReport:
    """The effects of quantizing a program's weights, beyond ordinary rounding.

    Attributes:
        values: the number of quantized values.
        saturated: the number of 8-bit values that were clamped.
        vanished: the number of groups whose scale became 0.
        affected: the weights with clamped values or such groups.
        kept: the number of values that are the source's own integers.
    """

    values: int
    saturated: int
    vanished: int
    affected: tuple[AffectedWeight, ...]
    kept: int = 0
