"""Calibration: token sequences that show passes and measurements what a model's layers are given."""

from .calibrate import Calibration, calibrate
from .report import CalibrationReport, calibration_report

__all__ = ["Calibration", "CalibrationReport", "calibrate", "calibration_report"]
