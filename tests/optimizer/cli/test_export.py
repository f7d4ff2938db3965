from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app
from enginewright.optimizer.cli.export import default_output


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("Llama-1B", "Llama-1B.bundle"),
        ("models/Llama-1B/", "Llama-1B.bundle"),
        ("some/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1.bundle"),
        ("organization/name", "name.bundle"),
    ],
)
def test_the_bundle_is_named_after_the_model(source: str, output: str) -> None:
    assert default_output(source) == Path(output)


def test_the_current_folder_has_a_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model")
    assert default_output(".") == Path("model.bundle")


def test_json_is_the_report(tiny_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.bundle"
    result = CliRunner().invoke(app, ["export", str(tiny_folder), "-o", str(output), "--json", "--quiet"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["path"] == str(output)
    assert report["bundle_bytes"] > 0
    assert {p["name"]: p["matched"] for p in report["passes"]}["fuse_gate_up"] == 2
    assert result.stderr == ""
    assert (output / "manifest.json").is_file()


def test_the_table(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["export", str(tiny_folder)])
    assert result.exit_code == 0, result.output
    assert "fuse_qkv" in result.stdout
    assert result.stderr == ""  # no progress where it can't move
    assert "tiny-llama.bundle: " in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama.bundle"]


def test_an_existing_bundle_is_replaced_only_with_force(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = ["export", str(tiny_folder), "-o", str(tmp_path / "a.bundle"), "--quiet"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    before = (tmp_path / "a.bundle" / "manifest.json").read_bytes()
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 7
    assert "a.bundle" in refused.stderr
    assert CliRunner().invoke(app, [*arguments, "--force"]).exit_code == 0
    assert (tmp_path / "a.bundle" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("model", "options", "code", "named"),
    [
        ("absent", [], 3, "absent"),
        ("empty", [], 3, "empty"),
        ("tiny", ["--recipe", "f23"], 5, "f23"),
        ("tiny", ["--target", "cuda"], 5, "cuda"),
    ],
)
def test_what_goes_wrong_is_named(
    model: str, options: list[str], code: int, named: str, tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    source = tiny_folder if model == "tiny" else tmp_path / model
    result = CliRunner().invoke(app, ["export", str(source), "-o", str(tmp_path / "a.bundle"), "--json", *options])
    assert result.exit_code == code, result.output
    assert named in json.loads(result.stdout)["error"]["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
