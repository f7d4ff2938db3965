"""Manifests that a test has edited, as their writer would have sealed them."""

from __future__ import annotations

from typing import Any

from enginewright.runtime.bundle.manifest import _sealed


def sealed(fields: dict[str, Any]) -> str:
    """The text of a manifest with these fields, and its hash."""
    return _sealed({key: value for key, value in fields.items() if key != "sha256"})
