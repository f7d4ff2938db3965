"""The records of passes for the report of an export. They don't import torch, since reports are read without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rejection:
    """A candidate that a rule's check rejected: the node, where it is in the model, and why."""

    node: str
    where: str
    reason: str


@dataclass(frozen=True)
class Metric:
    """A number that a pass measured at one place of the model, such as a layer's relative error after rounding."""

    where: str
    name: str
    value: float


@dataclass(frozen=True)
class AffectedWeight:
    """A weight of which values were clamped, or groups of small ones became zero; see ``QuantizationCounts``."""

    name: str
    saturated: int
    vanished: int


@dataclass(frozen=True)
class StoredWeight:
    """A weight whose source had quantized it already: by its name in the program, how the source packs it, and whether
    the bundle has the source's own values. If it hasn't, it has what they stand for, in the recipe's format."""

    name: str
    stored: str
    kept: bool


@dataclass(frozen=True)
class QuantizationReport:
    """All weights of a program that became integers together, and those that rounding did more to than round.

    ``values`` counts weights; ``saturated`` those of 8 bits that were clamped; ``vanished`` groups that became zero, or
    one number; ``kept`` weights that are the integers of the source, bit for bit.
    """

    values: int
    saturated: int
    vanished: int
    affected: tuple[AffectedWeight, ...]
    kept: int = 0
