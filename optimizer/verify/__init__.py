"""Verification: what is exported is compared with its source before the bundle gets its name."""

from __future__ import annotations

from .report import Comparison, TextComparison, VerificationReport
from .verify import verify

__all__ = ["Comparison", "TextComparison", "VerificationReport", "verify"]
