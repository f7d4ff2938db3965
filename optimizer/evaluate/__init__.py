"""Evaluation: how well a bundle predicts a text, how far it is from another model, what it answers."""

from __future__ import annotations

from enginewright.optimizer.measure.texts import BUILT_IN

from .choices import ChoiceReport
from .evaluate import ComparisonReport, EvaluationReport, TextReport, evaluate

__all__ = ["BUILT_IN", "ChoiceReport", "ComparisonReport", "EvaluationReport", "TextReport", "evaluate"]
