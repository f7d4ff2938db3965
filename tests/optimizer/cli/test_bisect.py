from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app
from enginewright.optimizer.cli.bisect import EXIT_PARTED
from tests.optimizer.bisect.planting import Planting, scale_rows

CLI = CliRunner()
NAME = "model.layers.1.self_attn.q_proj+k_proj+v_proj.weight"


@pytest.fixture(scope="module")
def changed(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle with a value projection that is 1 % too large."""
    planting = Planting(tiny_bundle, tmp_path_factory.mktemp("changed") / "changed.bundle")
    scale_rows(planting, NAME, 96, 128)
    return planting.folder


def test_sides_that_agree(tiny_bundle: Path) -> None:
    done = CLI.invoke(app, ["bisect", str(tiny_bundle), "--isa-b", "portable", "--text", "Hello there"])
    assert done.exit_code == 0, done.output
    assert "they agree" in done.stdout and "11 tokens in 1 sequences" in done.stdout


def test_sides_that_part(tiny_folder: Path, changed: Path) -> None:
    done = CLI.invoke(app, ["bisect", str(tiny_folder), str(changed), "--quiet"])
    assert done.exit_code == EXIT_PARTED
    for words in (
        "they part in emission, stored weights or kernels",
        "layer     model.layers.1\n",
        "at        output of model.layers.1.self_attn.v_proj",
        "made by   step ",
        f"with      {NAME}[96:128] (of model.layers.1.self_attn.v_proj.weight[0:32])",
        "is 1.0100 times what it is on side A",
        "farthest apart at token ",
    ):
        assert words in done.stdout, done.stdout


def test_json(tiny_bundle: Path, changed: Path) -> None:
    done = CLI.invoke(app, ["bisect", str(tiny_bundle), str(changed), "--json", "--tokens", "5,6,7", "--tokens", "8"])
    assert done.exit_code == EXIT_PARTED
    report = json.loads(done.stdout)
    assert report["sequences"] == [3, 1]
    assert report["parting"]["module"] == "model.layers.1.self_attn.v_proj"
    assert report["parting"]["gain"] == pytest.approx(1.01, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--tokens", "5,x"], 2, "no list of token ids"),
        (["--tolerance", "0"], 2, "is not above 0"),
        (["--tokens", "999"], 8, "token 999"),
        (["--target-b", "gpu"], 7, "no target 'gpu'"),
    ],
)
def test_bad_options(options: list[str], code: int, words: str, tiny_bundle: Path) -> None:
    done = CLI.invoke(app, ["bisect", str(tiny_bundle), *options])
    assert done.exit_code == code
    assert words in done.output


def test_no_such_model(tiny_bundle: Path, tmp_path: Path) -> None:
    done = CLI.invoke(app, ["bisect", str(tmp_path / "nothing"), str(tiny_bundle)])
    assert done.exit_code == 3 and "doesn't exist" in done.output
