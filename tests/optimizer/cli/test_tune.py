from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app
from enginewright.plugins.cpu.compile import tune as module
from enginewright.plugins.steps.timed_steps import Case


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_bundle, tmp_path / "own.bundle")


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEWEST", 1)
    monkeypatch.setattr(module, "_MOST", 1)


@pytest.mark.matrix
@pytest.mark.usefixtures("few_rounds")
def test_text_and_the_file(bundle: Path) -> None:
    result = CliRunner().invoke(app, ["tune", str(bundle), "--seconds", "60", "--threads", "1"])
    assert result.exit_code == 0, result.output
    first, *rest = result.stdout.splitlines()
    assert first.split() == ["choice", "value", "speed"]
    assert rest[0].startswith("task_bytes") and rest[0].find("32,768") + len("32,768") == first.find("value") + 5
    assert "milliseconds, rows" in result.stdout and "1 request at 64" in result.stdout
    nothing_faster = "nothing is faster here" in result.stdout
    assert nothing_faster != ("kept" in "".join(rest[:12]).split()) or "chosen:" in result.stdout
    assert result.stdout.rstrip().endswith("own.bundle.tune.json")
    assert json.loads((bundle.parent / "own.bundle.tune.json").read_text())["format_version"] == 1


def test_too_short_a_time_says_what_to_do(bundle: Path) -> None:
    result = CliRunner().invoke(app, ["tune", str(bundle), "--seconds", "0.001", "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert "0.001 seconds were too short for 12 of 12 choices: pass a larger --seconds" in result.stdout
    assert result.stdout.rstrip().endswith("own.bundle.tune.json was not written")
    assert [p.name for p in bundle.parent.iterdir()] == ["own.bundle"]


@pytest.mark.usefixtures("few_rounds")
def test_a_row_is_kept_only_if_the_choice_is(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first comparison finds one faster, and a last one doesn't."""
    calls = []

    def compared(one: object, other: object, cases: Sequence[Case], rounds: int) -> dict[str, float]:
        calls.append(rounds)
        return {case.name: 1.2 if len(calls) == 1 else 1.0 for case in cases}

    monkeypatch.setattr(module, "compare", compared)
    result = CliRunner().invoke(app, ["tune", str(bundle), "--seconds", "60", "--threads", "1"])
    assert "nothing is faster here" in result.stdout
    assert "1.200x  faster, and not so in the last comparison" in result.stdout
    assert " kept" not in result.stdout


@pytest.mark.usefixtures("few_rounds")
def test_quiet(bundle: Path) -> None:
    result = CliRunner().invoke(app, ["tune", str(bundle), "--seconds", "60", "--threads", "1", "--quiet"])
    assert result.exit_code == 0 and "task_bytes  " not in result.stdout and result.stderr == ""


@pytest.mark.usefixtures("few_rounds")
def test_json_of_a_dry_run(bundle: Path) -> None:
    arguments = ["tune", str(bundle), "--seconds", "60", "--threads", "1", "--dry-run", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["written"] is False and document["tried"]
    assert [p.name for p in bundle.parent.iterdir()] == ["own.bundle"]


def test_errors(bundle: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["tune", str(bundle), "--seconds", "0"]).exit_code == 2
    assert CliRunner().invoke(app, ["tune", str(tmp_path / "absent")]).exit_code == 7


def test_a_ctrl_c_leaves_nothing(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "compare", interrupted)
    assert CliRunner().invoke(app, ["tune", str(bundle), "--seconds", "60"]).exit_code == 130
    assert [p.name for p in bundle.parent.iterdir()] == ["own.bundle"]
