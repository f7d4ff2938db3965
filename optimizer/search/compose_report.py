"""Which ways to a small bundle were compared, for the report of an export."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """One way to the fewest bytes within a budget.

    Attributes:
        name: what is done to the model: "formats alone", "less of the model, then formats".
        bytes: of all weights; None if nothing on that way is within the budget.
        shapes_kl: of the model without what goes, before formats, on the worst kind of tokens.
        measured_kl: with its formats, on the worst kind.
        taken: whether the export went it.
        reason: why it led nowhere, if it did.
    """

    name: str
    bytes: int | None
    shapes_kl: float
    measured_kl: float | None
    taken: bool
    reason: str = ""
