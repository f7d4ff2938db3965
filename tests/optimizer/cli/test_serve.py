"""What `optimize serve` makes of a model before it serves it; what is served is tested in tests/runtime/server."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from enginewright.optimizer.cli import serve
from enginewright.runtime.bundle.reader import Bundle
from tests.conftest import make_tiny_model
from tests.optimizer.capture.test_gguf import write


def said(printed: str) -> list[str]:
    """The lines that aren't about progress, which come after seconds."""
    return [line for line in printed.splitlines() if not line.startswith("[")]


def test_a_quantized_file_is_served_as_it_is_unless_a_recipe_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = str(write(make_tiny_model("Llama"), tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0))
    for _ in range(2):  # the second time it is kept
        bundle = Bundle.open(Path(serve._exported(path, None)))
        assert bundle.manifest.recipe["name"] == "gguf"
        printed = capsys.readouterr()
        assert said(printed.err) == [f"{path}: recipe gguf, as the file is quantized"] and printed.out == ""
    assert Bundle.open(Path(serve._exported(path, "int8"))).manifest.recipe["name"] == "int8"
    assert said(capsys.readouterr().err) == []
    assert serve._exported(str(bundle.path), None) == str(bundle.path)  # a bundle is what it is
