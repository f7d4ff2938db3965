"""Families captured once for all tests of a worker."""

from __future__ import annotations

import pytest

from enginewright.optimizer.capture import capture


@pytest.fixture(scope="session")
def captured_families(tiny_model):
    """``captured_families("Llama")`` -> (the tiny model, what capture makes of it)."""
    captures = {}

    def get(family):
        if family not in captures:
            model = tiny_model(family)
            captures[family] = model, capture(model)
        return captures[family]

    return get
