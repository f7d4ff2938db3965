"""Calibration: token sequences that show passes and measurements what a model's layers are given."""

from .calibrate import Calibration, calibrate, calibration_report, tokens_of_recipe

__all__ = ["Calibration", "calibrate", "calibration_report", "tokens_of_recipe"]
