"""Reports of progress during an export or an evaluation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgressEvent:
    """A report that ``done`` of ``total`` items of a stage are finished. ``detail`` names the last of them.

    The stages of an export are load (of PyTorch and transformers), download (of a model of the Hub, in bytes), capture,
    calibration, auto (a search for formats), measure, passes, layers (of a pass that processes layers), emit, kernels
    (of attention, for GPUs), verify, roofline, write.
    """

    stage: str
    done: int
    total: int
    detail: str = ""


Progress = Callable[[ProgressEvent], None]


def silent(event: ProgressEvent) -> None:
    """Ignores the event."""


def loading(progress: Progress) -> None:
    """Reports the stage "load" before torch and transformers are imported, which takes seconds.

    Does nothing if they are loaded.
    """
    if "torch" not in sys.modules or "transformers" not in sys.modules:
        progress(ProgressEvent("load", 0, 1, "PyTorch and transformers"))
