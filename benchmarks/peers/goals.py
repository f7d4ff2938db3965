"""The goals of Enginewright against the best peer with the same bits, on two cores, and the reasons for missed ones."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["ratio", "bandwidth", "peak", "memory"]
REASONS = Path(__file__).with_name("reasons.toml")


@dataclass(frozen=True)
class Goal:
    """``wanted``: of "ratio" ours over the best peer's (turned around where less is better), of "bandwidth" the share
    of what the machine reads, of "peak" the share of its 8-bit products, of "memory" the most over weights and KV."""

    model: str
    format: str
    figure: str
    kind: Kind
    wanted: float

    @property
    def key(self) -> str:
        """The goal's key in reasons.toml."""
        return f"{self.model}.{self.format}.{self.figure}" + ("" if self.kind == "ratio" else f".{self.kind}")


def _ratios(model: str, wanted: Mapping[str, Mapping[str, float]]) -> list[Goal]:
    return [Goal(model, kind, figure, "ratio", w) for kind, rows in wanted.items() for figure, w in rows.items()]


def _both(**figures: float) -> dict[str, Mapping[str, float]]:
    return {"int8": figures, "int4": figures}


GOALS = (
    *_ratios("smollm2", {"int8": {"decode_1": 1.5}, "int4": {"decode_1": 1.7}}),
    Goal("smollm2", "int8", "decode_1", "bandwidth", 0.75),
    *_ratios("smollm2", _both(decode_8=2.0, decode_16=2.0)),
    *_ratios("smollm2", {"int8": {"prefill": 1.4}}),
    *_ratios("smollm2", _both(prefill_long=1.4, decode_long=1.4, start=2.0)),
    Goal("smollm2", "int8", "peak", "memory", 1.1),
    Goal("smollm2", "int4", "peak", "memory", 1.1),
    *_ratios("llama-1b", {"int8": {"decode_1": 1.0}, "int4": {"decode_1": 1.1}}),
    Goal("llama-1b", "int8", "decode_1", "bandwidth", 0.92),
    Goal("llama-1b", "int4", "decode_1", "bandwidth", 0.88),
    *_ratios("llama-1b", _both(decode_8=1.7, decode_16=1.7)),
    *_ratios("llama-1b", {"int8": {"prefill": 1.3}}),
    Goal("llama-1b", "int8", "prefill", "peak", 0.6),
    *_ratios("llama-1b", _both(prefill_long=1.3, decode_long=1.3, start=2.0)),
    Goal("llama-1b", "int8", "peak", "memory", 1.1),
    Goal("llama-1b", "int4", "peak", "memory", 1.1),
)


def judge(goal: Goal, table: Mapping[str, Any], reasons: Mapping[str, str]) -> dict[str, Any]:
    """The goal with what was measured: ``measured`` and ``met`` are None where something is missing. ``table`` is that
    of the goal's model and format, as ``summary`` makes it."""
    row: dict[str, Any] = {
        "model": goal.model,
        "format": goal.format,
        "figure": goal.figure,
        "kind": goal.kind,
        "wanted": goal.wanted,
        "measured": None,
        "peer": None,
        "kl_no_worse": None,
        "met": None,
        "reason": reasons.get(goal.key, ""),
    }
    if goal.kind == "ratio":
        best = table["best"].get(goal.figure)
        if best is not None:
            row |= {"measured": best["ratio"], "peer": best["engine"], "kl_no_worse": best["kl_no_worse"]}
            row["met"] = best["ratio"] >= goal.wanted and best["kl_no_worse"] is not False
        return row
    measured = table["limits"].get(
        {"bandwidth": "bandwidth_share", "peak": "peak_share", "memory": "memory"}[goal.kind]
    )
    if measured is not None:
        row["measured"] = measured
        row["met"] = measured <= goal.wanted if goal.kind == "memory" else measured >= goal.wanted
    return row


def read_reasons(path: Path = REASONS) -> dict[str, str]:
    """Reasons by the goals' keys. Raises ValueError for one that is of no goal."""
    reasons: dict[str, str] = tomllib.loads(path.read_text(encoding="utf-8"))
    if unknown := sorted(set(reasons) - {goal.key for goal in GOALS}):
        raise ValueError(f"{path.name}: {', '.join(unknown)}: there is no such goal")
    return reasons
