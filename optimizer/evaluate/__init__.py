"""Evaluation: a bundle's prediction of a text, its difference from another model, and its answers to questions."""

from __future__ import annotations

from enginewright.optimizer.measure.texts import BUILT_IN

from .choices import ChoiceReport
from .evaluate import ComparisonReport, EvaluationReport, TextReport, evaluate
from .texts import TextsReport, evaluate_texts

__all__ = [
    "BUILT_IN",
    "ChoiceReport",
    "ComparisonReport",
    "EvaluationReport",
    "TextReport",
    "TextsReport",
    "evaluate",
    "evaluate_texts",
]
