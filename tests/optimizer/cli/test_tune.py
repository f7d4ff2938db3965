from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app
from enginewright.optimizer.tune import tune as module


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_bundle, tmp_path / "own.bundle")


def test_text_and_the_file(bundle: Path) -> None:
    result = CliRunner().invoke(app, ["tune", str(bundle), "--seconds", "0.1", "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert "task_bytes" in result.stdout
    assert result.stdout.rstrip().endswith("own.bundle.tune.json")
    assert json.loads((bundle.parent / "own.bundle.tune.json").read_text())["format_version"] == 1


def test_json_of_a_dry_run(bundle: Path) -> None:
    arguments = ["tune", str(bundle), "--seconds", "0.1", "--threads", "1", "--dry-run", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["written"] is False and found["tried"]
    assert [p.name for p in bundle.parent.iterdir()] == ["own.bundle"]


def test_errors(bundle: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["tune", str(bundle), "--seconds", "0"]).exit_code == 8
    assert CliRunner().invoke(app, ["tune", str(tmp_path / "absent")]).exit_code == 7


def test_a_ctrl_c_leaves_nothing(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "compare", interrupted)
    assert CliRunner().invoke(app, ["tune", str(bundle), "--seconds", "0.1"]).exit_code == 130
    assert [p.name for p in bundle.parent.iterdir()] == ["own.bundle"]
