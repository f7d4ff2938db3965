from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app


def test_the_default_file(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["trace", str(tiny_bundle)])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("trace.json: 9 steps in ")
    assert "https://ui.perfetto.dev" in result.stdout
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"prompt of 64", "decode 8"} <= names


def test_sizes_and_json(tiny_bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "small.json"
    sizes = ["--prompt-tokens", "5", "--decode", "2", "--batch", "3", "--threads", "1"]
    result = CliRunner().invoke(app, ["trace", str(tiny_bundle), "-o", str(output), *sizes, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["path"] == str(output)
    assert document["steps"] == 3
    assert document["seconds"] > 0
    events = json.loads(output.read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert next(e for e in slices if e["name"] == "decode 2")["args"]["requests"] == 3
    assert next(e for e in events if e["name"] == "process_name")["args"]["name"].endswith(", 1 threads)")


def test_quiet(tiny_bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.json"
    result = CliRunner().invoke(app, ["trace", str(tiny_bundle), "-o", str(output), "--decode", "1", "--quiet"])
    assert result.exit_code == 0, result.output
    assert output.is_file() and result.stderr == ""


@pytest.mark.parametrize(("option", "value"), [("--batch", "0"), ("--prompt-tokens", "0"), ("--decode", "-1")])
def test_sizes_that_can_not_be(option: str, value: str, tiny_bundle: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["trace", str(tiny_bundle), "-o", str(tmp_path / "a.json"), option, value])
    assert result.exit_code == 2
    assert f"{option}: {value} is out of range" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_is_too_long(tiny_bundle: Path, tmp_path: Path) -> None:
    arguments = ["trace", str(tiny_bundle), "-o", str(tmp_path / "a.json"), "--prompt-tokens", "600"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 8
    assert "longer than the bundle's 512 tokens" in result.stderr
    assert list(tmp_path.iterdir()) == []
