"""A command that isn't there is answered with one that is; options that had other names go by them still."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from enginewright.optimizer.cli import bench, buckets, export, spelling, verify
from enginewright.optimizer.cli.app import app

WIDE = {"COLUMNS": "400", "NO_COLOR": "1"}


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("server", "Did you mean `optimize serve`?"),
        ("load-test", "Did you mean `optimize loadtest`?"),
        ("exprot", "Did you mean `optimize export`?"),
        ("quantize", "Did you mean `optimize export`?"),
        ("run", "Did you mean `optimize generate`?"),
        ("info", "Did you mean `optimize inspect`?"),
        ("evaluate", "Did you mean `optimize eval`?"),
        ("frobnicate", "`optimize --help` lists all commands."),
    ],
)
def test_an_unknown_command_is_answered(word: str, answer: str) -> None:
    result = CliRunner().invoke(app, [word, "a.bundle"], env=WIDE)
    assert result.exit_code == 2
    assert f"There is no command '{word}'. {answer}" in result.stderr


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["serve", "a.bundle", "--max-model-len", "512"], "The option here is --context;"),
        (["serve", "a.bundle", "--tensor-parallel-size=2"], "The option here is --ranks;"),
        (["serve", "a.bundle", "--api-key", "x"], "The option here is --api-keys; see `optimize serve --help`"),
        (["generate", "a.bundle", "-c", "512", "Hi"], "The option here is --context;"),
        (["export", "a", "--kv-cache-dtype", "fp8"], "The option here is --kv-cache;"),
    ],
)
def test_an_option_of_another_program_is_answered(words: list[str], answer: str) -> None:
    result = CliRunner().invoke(app, words, env=WIDE)
    assert result.exit_code == 2
    assert answer in result.stderr


def test_options_of_ours_and_texts_are_never_taken_for_those_of_others(tiny_bundle: Path) -> None:
    every = {spelled for of in options().values() for spelled in of}
    assert set(spelling._OPTIONS_MEANT) <= every
    assert "No such option" in CliRunner().invoke(app, ["doctor", "--max-model-len", "5"], env=WIDE).stderr
    help_page = CliRunner().invoke(app, ["loadtest", "--api-key", "x", "-c", "1", "--help"], env=WIDE)
    assert help_page.exit_code == 0
    done = CliRunner().invoke(app, ["generate", str(tiny_bundle), "-n", "1", "-q", "--", "--ctx-size"], env=WIDE)
    assert done.exit_code == 0, done.stderr


def options() -> dict[str, dict[str, list[str]]]:
    """Command -> the options that its help shows -> all their spellings."""
    group = get_command(app)
    by_command: dict[str, dict[str, list[str]]] = {}
    for name, command in getattr(group, "commands", {}).items():
        for parameter in command.params:
            if parameter.param_type_name == "option":
                for spelled in parameter.opts:
                    by_command.setdefault(name, {})[spelled] = list(parameter.opts)
    return by_command


def test_an_option_has_one_name_everywhere() -> None:
    for command, spelled in options().items():
        assert not {"--prompts", "--batches", "--contexts", "--context-length"} & set(spelled), command
        if "-n" in spelled:
            assert "--max-tokens" in spelled["-n"], command


@pytest.mark.parametrize("module", [bench, buckets, export, verify])
def test_old_names_are_not_shown(module: ModuleType) -> None:
    name, renamed = module.__name__.rpartition(".")[2], module.RENAMED
    shown = options()[name]
    for old, new in renamed.items():
        assert old not in shown and new in shown
    help_text = CliRunner().invoke(app, [name, "--help"], env=WIDE).stdout
    assert "--context-length" not in help_text and "--batches" not in help_text


def test_old_names_go_on_working(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("5\n17\n60\n")
    (tmp_path / "batches.txt").write_text("1\n4\n")
    new = ["--batch-sizes", "batches.txt", "--most", "4", "--context", "100"]
    old = ["--batches=batches.txt", "-n", "4", "--context-length", "100"]
    renamed = []
    for spelled in (new, old):
        spelled = [word.replace("batches.txt", str(tmp_path / "batches.txt")) for word in spelled]
        result = CliRunner().invoke(
            app, ["buckets", "--histogram", str(tmp_path / "lengths.txt"), *spelled, "--json"], env=WIDE
        )
        assert result.exit_code == 0, result.output
        renamed.append(json.loads(result.stdout))
    assert renamed[0] == renamed[1]
    wrong = CliRunner().invoke(app, ["bench", "nowhere", "--prompts", "4,x"], env=WIDE)
    assert wrong.exit_code == 2 and "--prompt: '4,x' is not a list of numbers" in wrong.stderr


def test_a_bill_of_materials_is_json_with_and_without_saying_so(tiny_bundle: Path) -> None:
    plain, bill = (CliRunner().invoke(app, ["sbom", str(tiny_bundle), *more]) for more in ([], ["--json", "--quiet"]))
    assert json.loads(plain.stdout) == json.loads(bill.stdout)
    failed = CliRunner().invoke(app, ["sbom", "nowhere", "--json"])
    assert failed.exit_code == 7
    assert json.loads(failed.stdout)["error"]["type"] == "BundleError"
