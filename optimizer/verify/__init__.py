"""Verification: the program is compared with its source from pass to pass, the bundle before it gets its name."""

from __future__ import annotations

from .measure_passes import PassMeasurements
from .measure_source import measure_against
from .verify import verify

__all__ = ["PassMeasurements", "measure_against", "verify"]
