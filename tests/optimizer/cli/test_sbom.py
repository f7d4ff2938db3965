from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["sbom", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_to_stdout_and_to_a_file(
    tiny_bundle: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    code, out, _ = run(tiny_bundle)
    assert code == 0
    assert json.loads(out)["specVersion"] == "1.6"
    assert run(tiny_bundle, "-o", tmp_path / "a.json")[:2] == (0, "")
    assert (tmp_path / "a.json").read_text() == out
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert run(tiny_bundle, "--source", tiny_folder, "--output", tmp_path / "b.json")[0] == 0
    bill = json.loads((tmp_path / "b.json").read_text())
    assert bill["metadata"]["timestamp"] == "1970-01-01T00:00:00Z"
    assert bill["metadata"]["component"]["pedigree"]["ancestors"][0]["components"]


def test_errors(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    assert run(tiny_bundle, "--source", tmp_path)[0] == 3
    assert run(tmp_path)[0] == 7
    assert run(tiny_bundle, "-o", tmp_path / "none" / "a.json")[0] == 8
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "soon")
    code, _, err = run(tiny_bundle)
    assert code == 8
    assert "SOURCE_DATE_EPOCH: 'soon'" in err
