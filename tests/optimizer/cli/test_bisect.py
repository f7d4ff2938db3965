from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app
from enginewright.optimizer.cli.bisect import EXIT_DIFFERS
from enginewright.optimizer.export import export
from tests.optimizer.bisect.planting import Planting, scale_rows

CLI = CliRunner()
NAME = "model.layers.1.self_attn.q_proj+k_proj+v_proj.weight"


@pytest.fixture(scope="module")
def changed(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle with a value projection that is 1 % too large."""
    planting = Planting(tiny_bundle, tmp_path_factory.mktemp("changed") / "changed.bundle")
    scale_rows(planting, NAME, 96, 128)
    return planting.folder


def test_runs_that_agree(tiny_bundle: Path) -> None:
    done = CLI.invoke(app, ["bisect", str(tiny_bundle), "--isa-b", "portable", "--text", "Hello there"])
    assert done.exit_code == 0, done.output
    assert "they agree" in done.stdout and "11 tokens in 1 sequence\n" in done.stdout


def test_encoders(pooled_bundles: dict[str, Path], tmp_path: Path) -> None:
    """int8 scales the inputs of linears after norms that are residuals: values before and after agree."""
    bundle, rounded = pooled_bundles["embed"], tmp_path / "int8.bundle"
    source = bundle.parent / "tiny-embed"
    export(source, rounded, recipe="int8")
    for b in (bundle, rounded):
        done = CLI.invoke(app, ["bisect", str(source), str(b), "--quiet"])
        assert done.exit_code == 0, done.output
        assert "a model for embed: values of tokens are compared" in done.stdout and "they agree" in done.stdout
    planting = Planting(bundle, tmp_path / "changed.bundle")
    scale_rows(planting, "encoder.layer.1.attention.self.query+key+value.weight", 64, 96)
    done = CLI.invoke(app, ["bisect", str(source), str(planting.folder), "--quiet", "--json"])
    assert done.exit_code == EXIT_DIFFERS, done.output
    assert json.loads(done.stdout)["parting"]["point"] == "output of encoder.layer.1.attention.self.value"


def test_runs_that_differ(tiny_folder: Path, changed: Path) -> None:
    done = CLI.invoke(app, ["bisect", str(tiny_folder), str(changed), "--quiet"])
    assert done.exit_code == EXIT_DIFFERS
    for words in (
        "they first differ in emission, stored weights or kernels",
        "layer     model.layers.1\n",
        "at        output of model.layers.1.self_attn.v_proj",
        "made by   step ",
        f"with      {NAME}[96:128] (of model.layers.1.self_attn.v_proj.weight[0:32])",
        "is 1.0100 times what it is in A",
        "farthest apart at token ",
    ):
        assert words in done.stdout, done.stdout


def test_json(tiny_bundle: Path, changed: Path) -> None:
    done = CLI.invoke(app, ["bisect", str(tiny_bundle), str(changed), "--json", "--tokens", "5,6,7", "--tokens", "8"])
    assert done.exit_code == EXIT_DIFFERS
    report = json.loads(done.stdout)
    assert report["sequences"] == [3, 1]
    assert report.keys() >= {"agrees", "points", "largest_error_at", "not_covered"}  # names that scripts know
    assert report["parting"].keys() >= {"pass_name", "point", "calls", "largest", "others_count"}
    assert all(list(factor) == ["between", "factor", "point"] for factor in report["smallest_factors"])
    assert report["parting"]["point"] == "output of model.layers.1.self_attn.v_proj"
    assert report["parting"]["module"] == "model.layers.1.self_attn.v_proj"
    assert report["parting"]["gain"] == pytest.approx(1.01, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--tokens", "5,x"], 2, "a list of token ids"),
        (["--tolerance", "0"], 2, "is not above 0"),
        (["--tokens", "999"], 8, "token 999"),
        (["--layers", "3-1"], 2, "isn't a layer's number"),
        (["--layers", "3,x"], 2, "isn't a layer's number"),
        (["--layers", "9"], 8, "layer 9"),
        (["--target-b", "gpu"], 7, "no target 'gpu'"),
    ],
)
def test_bad_options(options: list[str], code: int, words: str, tiny_bundle: Path) -> None:
    done = CLI.invoke(app, ["bisect", str(tiny_bundle), *options])
    assert done.exit_code == code
    assert words in done.output


def test_stored_tensors_are_named(tiny_folder: Path, changed: Path) -> None:
    done = CLI.invoke(app, ["bisect", str(tiny_folder), str(changed), "--quiet", "--layers", "1"])
    assert done.exit_code == EXIT_DIFFERS
    for words in (
        "layers    1\n",
        "compared bit for bit",
        f"{NAME} (of model.layers.1.self_attn.v_proj.weight[0:32]): ",
        "(rows 96:128); there B is 1.0100 times A",
        "sees      in exact passes: factors of ",
    ):
        assert words in done.stdout, done.stdout
    others = CLI.invoke(app, ["bisect", str(tiny_folder), str(changed), "--json", "--layers", "0-0"])
    assert others.exit_code == 0 and json.loads(others.stdout)["agrees"] is True
    missing = CLI.invoke(app, ["bisect", str(tiny_folder), str(changed), "--layers", "0,5"])
    assert missing.exit_code == 8 and "layer 5 is not one of the model's" in missing.output


def test_a_row_that_no_token_has_is_named(tiny_folder: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    planting = Planting(tiny_bundle, tmp_path / "row.bundle")
    scale_rows(planting, "model.embed_tokens.weight", 77, 78)
    done = CLI.invoke(app, ["bisect", str(tiny_folder), str(planting.folder), "--tokens", "5,6,7"])
    assert done.exit_code == EXIT_DIFFERS
    for words in (
        "stored tensors differ; the values on these tokens agree",
        "model.embed_tokens.weight (of model.embed_tokens.weight[77:78])",
        "not run   model.embed_tokens: ",
    ):
        assert words in done.stdout, done.stdout


def test_without_torch_it_says_what_to_install(tiny_bundle: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from enginewright.optimizer.cli.app import main\n"
        f"sys.argv = ['optimize', 'bisect', {str(tiny_bundle)!r}]\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 10 and "Traceback" not in done.stderr
    assert "needs torch, which is not installed" in done.stderr and "enginewright[export]" in done.stderr


def test_no_such_model(tiny_bundle: Path, tmp_path: Path) -> None:
    done = CLI.invoke(app, ["bisect", str(tmp_path / "nothing"), str(tiny_bundle)])
    assert done.exit_code == 3 and "doesn't exist" in done.output


def test_an_instruction_set_that_is_not_there(tiny_bundle: Path) -> None:
    done = CLI.invoke(app, ["bisect", str(tiny_bundle), "--isa-b", "avx9000"])
    assert done.exit_code == 2 and "there are no kernels" in done.output and "portable" in done.output
