"""What an export's report says of its calibration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from enginewright.passes.framework.base import Metric

from .calibrate import Calibration
from .coverage import Coverage, measure_coverage


@dataclass(frozen=True)
class CalibrationReport:
    """Where the tokens are from, and what they cover."""

    origin: str
    coverage: Coverage


def calibration_report(
    calibration: Calibration | None, vocab_size: int, metrics: Iterable[Metric]
) -> CalibrationReport | None:
    """The report once passes have measured their ``metrics``; None if nothing was calibrated."""
    if calibration is None:
        return None
    return CalibrationReport(calibration.origin, measure_coverage(calibration.sequences, vocab_size, metrics))
