"""Engines that were built: what an export reports of them, and what `optimize build` writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class BuiltPlan:
    """An engine for steps of one phase, as ``optimize build`` writes it.

    ``scratch_bytes``: of GPU memory that it needs while it runs, as the library says once it is loaded.
    """

    phase: Literal["decode", "prefill"]
    plan: bytes
    scratch_bytes: int


@dataclass(frozen=True)
class EngineReport:
    """An engine as it was built, for report.json.

    Attributes:
        target: whose it is.
        file: its path in the bundle.
        seconds: of building it.
        peak_rss_bytes: the most that the process which built it had resident.
        file_bytes: of the file.
        compute_capabilities: what it was built for.
        profiles: sizes of its steps, as text.
        attentions: that the library fuses; others are computed op by op.
    """

    target: str
    file: str
    seconds: float
    peak_rss_bytes: int
    file_bytes: int
    compute_capabilities: tuple[str, ...]
    profiles: tuple[str, ...]
    attentions: int
