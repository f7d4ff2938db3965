"""The families of decoders that transformers has, and the outcome of an export of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RECORDS = Path(__file__).resolve().parent / "golden" / "families.json"
"""Family -> its record. tests/acceptance/test_families_table.py writes it."""


@dataclass(frozen=True)
class Family:
    """The outcome for a family.

    Attributes:
        result: "works", "refused" or "not tried".
        kl: a bound for the mean KL divergence per token of the recipe int8; None if there is none.
        note: the message of a refusal, or the limit within which the family works.
    """

    result: str
    kl: float | None
    note: str


def read_families() -> dict[str, Family]:
    """The records, sorted by family."""
    return {name: Family(**record) for name, record in json.loads(RECORDS.read_text(encoding="utf-8")).items()}


def working_families() -> list[str]:
    """The families that work on the cpu target, without variants of their configuration."""
    return [name for name, one in read_families().items() if one.result == "works" and "," not in name]
