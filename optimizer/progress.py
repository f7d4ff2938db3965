"""What an export or an evaluation tells while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgressEvent:
    """``done`` of ``total`` of a stage (an export: capture, passes, emit, verify, write); ``detail``: what was last done."""

    stage: str
    done: int
    total: int
    detail: str = ""


Progress = Callable[[ProgressEvent], None]


def silent(event: ProgressEvent) -> None:
    """Tells nothing."""
