"""Verification: the program is compared with its source from pass to pass, the bundle before it gets its name."""

from __future__ import annotations

from .measure_passes import PassMeasurements
from .measure_source import measure_against
from .report import Comparison, Measurement, PassVerification, TextComparison, VerificationReport
from .verify import verify

__all__ = [
    "Comparison",
    "Measurement",
    "PassMeasurements",
    "PassVerification",
    "TextComparison",
    "VerificationReport",
    "measure_against",
    "verify",
]
