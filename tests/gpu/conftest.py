"""These tests need a GPU, and skip without one. On a machine without the package installed: PYTHONPATH=src."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def capability() -> int:
    """Gives the GPU's: 90 for 9.0."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
