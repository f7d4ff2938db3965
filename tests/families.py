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


RECURRENT = frozenset(
    (
        *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2"),
        *("lfm2_moe", "lfm3", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba", "zamba2"),
    )
)
"""Families with recurrent layers, which only targets with kernels for states run."""


def working_families(*, recurrent: bool = True) -> list[str]:
    """The families that work on the cpu target, without variants of their configuration.

    ``recurrent``: False leaves out those that other targets refuse.
    """
    families = [name for name, one in read_families().items() if one.result == "works" and "," not in name]
    return families if recurrent else [name for name in families if name not in RECURRENT]
