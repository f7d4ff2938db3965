"""Every command that runs a source takes saved folders, of families that write their attention out too.

transformers can't change the attention of such a class once it is built, so each command must build it eager.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app

from .tiny_configs import tiny_family

# Model types whose attention isn't on transformers' interface, and one whose attention is.
WRITTEN_OUT = ("falcon", "bloom", "codegen", "gpt_neo", "gptj", "mpt", "roformer", "xglm")
FAMILIES = (*WRITTEN_OUT, "llama")

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_TEXT = "A short text, with a comma, and another sentence. It goes on for a while; then it ends.\n"


@pytest.fixture
def folder(family: str, tiny_folder: Path, tmp_path: Path) -> Path:
    """A saved tiny model of a family, with the tokenizer of ``tiny_folder``."""
    folder = tmp_path / "saved"
    vocabulary = json.loads((tiny_folder / "config.json").read_text())["vocab_size"]
    tiny_family(family, vocab_size=vocabulary).save_pretrained(folder)
    for name in _TOKENIZER:
        if (tiny_folder / name).exists():
            shutil.copy(tiny_folder / name, folder)
    return folder


def run(*arguments: Any) -> str:
    """Runs a command, and returns what it prints. It must end with 0."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"{arguments[0]}: {result.output}"
    return result.stdout


@pytest.mark.parametrize("family", FAMILIES)
def test_commands_that_run_a_source(folder: Path, tmp_path: Path) -> None:
    bundle, text = tmp_path / "a.bundle", tmp_path / "text.txt"
    text.write_text(_TEXT)
    report = json.loads(run("export", folder, "-o", bundle, "--json", "--quiet"))
    assert report["verification"][0]["random_tokens"]["kl_mean"] < 1e-6
    assert "agree" in run("bisect", folder, bundle, "--quiet")
    run("verify", bundle, "--source", folder, "--quiet")
    compared = json.loads(run("eval", bundle, "--against", folder, "--text", text, "--json", "--quiet"))
    assert compared["comparison"]["kl_mean"] < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_commands_that_learn_from_a_source(folder: Path, tmp_path: Path) -> None:
    """Calibration samples from the source, and a recovery trains on what it samples."""
    formats = (
        '[weights.default]\nstorage = "int4"\ngroup_size = 16\nactivation = "int8"\nactivation_group_size = 16\n'
        "[budget]\nmax_kl = 5.0\n"
    )
    (tmp_path / "gptq.toml").write_text(f'name = "gptq"\n[weights]\nmethod = "gptq"\n{formats}')
    (tmp_path / "nearest.toml").write_text(f'name = "nearest"\n{formats}')
    run("export", folder, "-o", tmp_path / "gptq.bundle", "--recipe", tmp_path / "gptq.toml", "--quiet")
    options = ("--steps", 2, "--batch-tokens", 64, "--sequence-length", 16, "--sampled-tokens", 256, "--quiet")
    run("recover", folder, "-o", tmp_path / "recovered", "--recipe", tmp_path / "nearest.toml", *options)
