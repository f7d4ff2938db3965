"""Progress that an export or an evaluation reports while it works."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgressEvent:
    """``done`` of ``total`` of a stage; ``detail``: what was last done.

    The stages of an export are load (of PyTorch and transformers), download (of a model of the Hub, in bytes), capture,
    calibration, auto (a search for formats), measure, passes, layers (of a pass that takes them one by one), emit,
    kernels (of attention, for GPUs), verify, roofline, write.
    """

    stage: str
    done: int
    total: int
    detail: str = ""


Progress = Callable[[ProgressEvent], None]


def silent(event: ProgressEvent) -> None:
    """Tells nothing."""


def loading(progress: Progress) -> None:
    """Tells that what reads models is imported next, which takes seconds; nothing where it is there already."""
    if "torch" not in sys.modules or "transformers" not in sys.modules:
        progress(ProgressEvent("load", 0, 1, "PyTorch and transformers"))
