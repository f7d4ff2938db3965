"""One bundle with two targets through the commands: generate, eval and verify by the name of the target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from enginewright.optimizer.cli.app import app
from enginewright.optimizer.export import export


def optimize(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def bundle(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "tiny.bundle"
    export(tiny_folder, path, recipe="f32", targets=("cpu", "onnx"))
    return path


def test_generate(bundle: Path) -> None:
    arguments = ("generate", bundle, "Hello", "World, and so on", "--raw", "--max-tokens", 12, "--json", "--stats")
    answers = [json.loads(optimize(*arguments, "--target", target).stdout) for target in ("cpu", "onnx")]
    assert answers[0]["results"] == answers[1]["results"]
    usual = json.loads(optimize(*arguments).stdout)
    named = [answer["stats"]["executor"]["target"] for answer in (usual, *answers)]
    assert named == ["cpu", "cpu", "onnx"]
    assert answers[1]["stats"]["executor"]["provider"] == "CPUExecutionProvider"


def test_a_provider_that_is_not_there(bundle: Path) -> None:
    result = optimize("generate", bundle, "Hello", "--target", "onnx", "--provider", "directml")
    assert result.exit_code == 10
    assert "no DmlExecutionProvider; it has" in result.stderr
    assert "onnxruntime-directml" in result.stderr


def test_eval_against_the_other_target(bundle: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The harbour of Saint-Malo lies behind granite walls. " * 4)
    arguments = ("eval", bundle, "--text", text, "--window", 64, "--json", "--quiet")
    result = optimize(*arguments, "--target", "onnx", "--against", bundle)
    assert result.exit_code == 0, result.output
    compared = json.loads(result.stdout)["comparison"]
    assert compared["kl_mean"] < 1e-9  # of logits that are 1e-6 apart, of 32-bit floats summed in other orders
    assert compared["top1_agreement"] == 1
    assert 0 < compared["max_logit_difference"] < 1e-4  # not the same target on both sides


def test_verify(bundle: Path, tiny_folder: Path, tmp_path: Path) -> None:
    result = optimize("verify", bundle, "--source", tiny_folder, "--json", "--quiet")
    assert result.exit_code == 0, result.output
    targets = {target["target"]: target for target in json.loads(result.stdout)["targets"]}
    assert set(targets) == {"cpu", "onnx"}
    assert targets["onnx"]["comparison"]["random_tokens"]["tokens"] > 10
    damaged = shutil.copytree(bundle, tmp_path / "damaged.bundle")
    model = damaged / "model.onnx"
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 1
    model.write_bytes(data)
    result = optimize("verify", damaged)
    assert result.exit_code == 7
    assert "model.onnx: SHA-256 is not the one" in result.stderr
    model.write_bytes(data[:-5])
    result = optimize("generate", damaged, "Hello", "--target", "onnx")
    assert result.exit_code == 7
    assert "model.onnx: " in result.stderr and "cut off or altered" in result.stderr
