from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginewright.optimizer.bench import measure
from enginewright.optimizer.cli.app import app

SMALL = ["--prompt", "4", "--batch", "1", "--context", "8", "--steps", "2", "--rounds", "1", "--threads", "1"]
LOOKUP = ["--speculate", "lookup"]


def test_tables_and_a_plot(tiny_bundle: Path, tmp_path: Path) -> None:
    plot = tmp_path / "speed.svg"
    result = CliRunner().invoke(app, ["bench", str(tiny_bundle), *SMALL, "--profile", "--plot", str(plot), *LOOKUP])
    assert result.exit_code == 0, result.output
    for words in (
        "with lookup",
        "time to first token",
        "time per output token",
        "memory ",
        "limits ",
        "medians of 1 round of 2",
    ):
        assert words in result.stdout
    assert "paged_attention" in result.stdout
    assert plot.read_text().lstrip().startswith("<svg")


def test_json(tiny_bundle: Path) -> None:
    result = CliRunner().invoke(app, ["bench", str(tiny_bundle), *SMALL, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["prompts"][0]["tokens"] == 4
    assert document["profiles"] == []


def test_quiet(tiny_bundle: Path) -> None:
    result = CliRunner().invoke(app, ["bench", str(tiny_bundle), *SMALL, "--quiet"])
    assert result.exit_code == 0, result.output
    assert "time per output token" in result.stdout and result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--prompt", "4,x"], 2, "not a list of numbers"),
        (["--prompt", "none", "--batch", "none"], 2, "nothing to measure"),
        (["--prompt", "9999"], 2, "--prompt: "),
        (["--prompt", "-4"], 2, "--prompt: -4 is out of range"),
        (["--steps", "0"], 2, "--steps: 0 is out of range"),
        (["--speculate", ""], 2, "isn't a way to guess tokens"),
        (["--speculate", "draft"], 7, "speculate: draft doesn't exist"),
        (["--speculate", "lookup", "--target", "onnx"], 7, "onnx"),
        (["--memory", "lots"], 2, "isn't a size"),
        (["--target", "onnx"], 7, "onnx"),
        (["--plot", "absent/a.svg", *SMALL], 7, "no such folder"),
    ],
)
def test_errors(arguments: list[str], code: int, named: str, tiny_bundle: Path, tmp_path: Path) -> None:
    arguments = [a.replace("absent", str(tmp_path / "absent")) for a in arguments]
    result = CliRunner().invoke(app, ["bench", str(tiny_bundle), *arguments])
    assert result.exit_code == code, result.output
    assert named in result.stderr


def test_a_ctrl_c_ends_it(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "_round", interrupted)
    plot = tmp_path / "a.svg"
    result = CliRunner().invoke(app, ["bench", str(tiny_bundle), *SMALL, "--plot", str(plot)])
    assert result.exit_code == 130
    assert not plot.exists()


def test_a_model_that_computes_whole_texts_is_refused(pooled_bundles: dict[str, Path]) -> None:
    result = CliRunner().invoke(app, ["bench", str(pooled_bundles["rerank"]), *SMALL])
    assert result.exit_code == 8 and "is a model for rerank" in result.stderr, result.output
