"""Calibration: token sequences on which passes and measurements observe a model's layers."""

from .calibrate import Calibration, calibrate, calibration_report, tokens_of_recipe

__all__ = ["Calibration", "calibrate", "calibration_report", "tokens_of_recipe"]
