"""Fixtures of tests of plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.plugins.steps.planning import CountedSteps
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.lowered_program import LoweredProgram


@pytest.fixture(scope="session")
def tiny_program(tiny_bundle: Path) -> LoweredProgram:
    """The tiny Llama's, of 32-bit floats, for the cpu target."""
    return Bundle.open(tiny_bundle).programs["cpu"]


@pytest.fixture(scope="session")
def tiny_steps(tiny_program: LoweredProgram) -> CountedSteps:
    """Its steps by kind."""
    return CountedSteps(tiny_program)
