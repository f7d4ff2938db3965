"""Typed errors: what they say, and copies of them in other words."""

from __future__ import annotations

import pytest

from enginewright.runtime.shared.errors import BundleError, ContextError, EnginewrightError, OverloadError


@pytest.mark.parametrize(
    "error",
    [
        BundleError("manifest.json: it is damaged", hint="Export it again."),
        ContextError("prompt: too long", context=8, tokens=9),
        OverloadError("queue: full", retry_after=2.0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_in_other_words_keeps_its_class_and_attributes(error: EnginewrightError) -> None:
    other = error.reworded("--prompt: other", hint=None)
    assert type(other) is type(error) and str(other) == "--prompt: other"
    changed = {"message": "--prompt: other", "hint": None}
    assert vars(other) == vars(error) | changed and error.message != other.message
