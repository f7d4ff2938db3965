"""What the search of ``auto`` looked at and found, for the report of an export."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParetoPoint:
    """An assignment of formats to all units.

    Attributes:
        bytes: of all weights.
        predicted_kl: sum of what each unit's format costs alone, in nats a token.
        measured_kl: of the quantized program on the tokens of the check; None if it was not measured.
    """

    bytes: int
    predicted_kl: float
    measured_kl: float | None = None


@dataclass(frozen=True)
class FormatOption:
    """A format that a unit can have."""

    format: str
    bytes: int
    predicted_kl: float


@dataclass(frozen=True)
class UnitChoice:
    """A unit by its modules, the format that it got, and all that it could have."""

    where: str
    format: str
    options: tuple[FormatOption, ...]


@dataclass(frozen=True)
class AutoReport:
    """How formats were chosen.

    Attributes:
        max_kl, max_bytes: the budget.
        tokens: that each unit was measured with.
        together: units were measured one by one, or layer by layer.
        chosen: what was taken; measured.
        measured_kl: of what was taken, by the kind of tokens of the check.
        shapes_kl: of that, what the model's shape costs that the recipe changes, on the worst kind.
        curve: the Pareto curve, from the least KL to the fewest bytes; of a long one some points.
        single: one format for every unit that can have it, the least exact one that fits for the others.
        tried: what was measured on the way, in order.
        units: in the order of the program.
        seconds: that it all took.
    """

    max_kl: float | None
    max_bytes: int | None
    tokens: int
    together: str
    chosen: ParetoPoint
    measured_kl: dict[str, float]
    curve: tuple[ParetoPoint, ...]
    single: dict[str, ParetoPoint]
    tried: tuple[ParetoPoint, ...]
    units: tuple[UnitChoice, ...]
    seconds: float
    shapes_kl: float = 0.0
