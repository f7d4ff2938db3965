"""optimize recover: what it prints, and how it says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app


def test_options_reach_the_recovery_and_json_has_its_report(tiny_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("Some words to train on, and then some more of them. " * 60)
    line = f"recover {tiny_folder} -r int4 -o {tmp_path / 'r'} --text {text} --steps 2 --batch-tokens 128"
    done = CliRunner().invoke(app, [*line.split(), "--sequence-length", "64", "--lr", "1e-4", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["recipe"] == "int4"
    assert report["steps"] == len(report["losses"]) == 2
    assert report["origin"] == "the text notes.txt"
    assert (tmp_path / "r" / "weights.safetensors").exists()
    again = CliRunner().invoke(app, line.split())
    assert again.exit_code == 8
    assert "is a recovery already" in again.stderr
    assert "--resume" in again.stderr
    anew = CliRunner().invoke(app, [*line.split(), "--steps", "1", "--force"])
    assert anew.exit_code == 0 and f"export {tiny_folder} --recovered {tmp_path / 'r'}" in anew.stdout, anew.output


def test_the_help_has_examples_and_a_missing_recipe_is_said() -> None:
    helped = CliRunner().invoke(app, ["recover", "--help"])
    assert helped.exit_code == 0
    assert "--recovered smollm2.recovered" in helped.stdout.replace("\n", " ")
    assert CliRunner().invoke(app, ["recover", "model", "-o", "r"]).exit_code == 2
