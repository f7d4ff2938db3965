"""Options of the tests of passes."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``pytest tests/passes --update-golden`` writes tests/golden anew from what the passes give now."""
    parser.addoption("--update-golden", action="store_true", default=False, help="rewrite the files in tests/golden")
