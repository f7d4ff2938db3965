"""The search for the library of operators, and the message if it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.plugins.onnx import kernels as package
from enginewright.plugins.onnx.kernels.library import NAME, find_operators, operators_library
from enginewright.runtime.shared.errors import MissingDependencyError


def test_it_is_built() -> None:
    assert operators_library() == find_operators()
    assert operators_library().name == NAME


def test_every_folder_of_the_package_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an editable install the library isn't beside the modules."""
    sources, built = tmp_path / "sources", tmp_path / "built"
    built.mkdir()
    monkeypatch.setattr(package, "__path__", [str(sources), str(built)])
    assert find_operators() is None
    with pytest.raises(MissingDependencyError, match=rf"{NAME}, .* is missing beside .*\n.*pip"):
        operators_library()
    (built / NAME).touch()
    assert find_operators() == operators_library() == built / NAME
