from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel
from typer.testing import CliRunner

from enginewright.optimizer.capture.gguf.header import READER_VERSION
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.export import export
from enginewright.runtime.bundle.manifest import MANIFEST_PATH
from enginewright.runtime.bundle.reader import Bundle
from tests.runtime.bundle.code_targets import with_target
from tests.sealed import sealed


def inspect(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["inspect", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_summary(tiny_bundle: Path) -> None:
    text = inspect(str(tiny_bundle))
    assert "LlamaForCausalLM" in text
    assert "cpu: ready" in text
    assert "2 layers, 2 heads of 16, f32" in text  # the KV cache


def test_a_bundle_of_an_older_gguf_reader_is_named(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "a.bundle"))
    manifest = json.loads((bundle / MANIFEST_PATH).read_text())
    for reader, named in (({}, True), ({"reader": READER_VERSION}, False)):
        manifest["source"] = {"kind": "gguf", "name": "m.gguf", **reader}
        (bundle / MANIFEST_PATH).write_text(sealed(manifest))
        assert ("m.gguf was read by an older version of the GGUF reader" in inspect(str(bundle))) == named
        result = CliRunner().invoke(app, ["verify", str(bundle)])
        assert ("m.gguf was read by an older version" in result.stdout) == named, result.output


def test_an_adaptive_context(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    recipe, bundle = tmp_path / "long.toml", tmp_path / "long.bundle"
    recipe.write_text('name = "long"\n[adaptive_context]\nbest = 512\nbelow = 4096\nwhole_layers = 1\n')
    export(tiny_model("Llama"), bundle, recipe=recipe)
    assert "adaptive context: 1 layers look at 832 keys and a token's own block, from position 4,096 on" in inspect(
        str(bundle)
    )


def test_the_summary_as_json(tiny_bundle: Path) -> None:
    data = json.loads(inspect(str(tiny_bundle), "--json"))
    assert data["model"]["vocab_size"] == 259
    assert data["targets"]["cpu"]["state"] == "ready"
    assert data["recipe"] == "f32"
    assert data["sizes"]["bundle_bytes"] > data["sizes"]["weight_bytes"] > 0


def test_weights_by_type_and_the_comparison_with_the_source(tiny_bundle: Path, tmp_path: Path) -> None:
    data = json.loads(inspect(str(tiny_bundle), "--json"))
    assert sum(data["weight_bytes_by_type"].values()) == data["sizes"]["weight_bytes"]
    report = json.loads((tiny_bundle / "report" / "report.json").read_text())
    assert data["verification"] == report["verification"]
    text = inspect(str(tiny_bundle))
    assert "weights     f32 " in text
    assert "verified    target cpu, compared with the source on 82 random tokens" in text

    older = Path(shutil.copytree(tiny_bundle, tmp_path / "older.bundle"))
    (older / "report" / "report.json").write_text("{}")
    assert "verified" not in inspect(str(older))
    bare = Path(shutil.copytree(tiny_bundle, tmp_path / "bare.bundle", ignore=shutil.ignore_patterns("report")))
    assert "verified" not in inspect(str(bare))
    assert json.loads(inspect(str(bare), "--json"))["verification"] is None


@pytest.mark.parametrize(
    "text", ["{", "3", "null", '{"verification": 3}', '{"verification": [{"text": 1}]}', '{"verification": [3]}']
)
def test_a_damaged_report(text: str, tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "damaged.bundle"))
    (bundle / "report" / "report.json").write_text(text)
    result = CliRunner().invoke(app, ["inspect", str(bundle)])
    assert result.exit_code == 7
    assert "report.json: no report of an export" in result.stderr
    assert inspect(str(bundle), "--passes")


def test_the_program(tiny_bundle: Path) -> None:
    lines = inspect(str(tiny_bundle), "--program").splitlines()
    assert sum("paged_attention(" in line for line in lines) == 2
    assert any("# model.layers.1" in line for line in lines)
    assert lines[-1].strip().startswith("logits -> ")
    data = json.loads(inspect(str(tiny_bundle), "--program", "--json"))
    assert len(data["steps"]) == len(lines) - 1


def test_the_program_of_a_rank(tiny_bundle: Path) -> None:
    text = inspect(str(tiny_bundle), "--program", "--partition", "tensor=2", "--rank", "1")
    assert "all_gather" in text and "all_gather" not in inspect(str(tiny_bundle), "--program")
    for wrong in (["--partition", "tensor=2"], ["--program", "--partition", "tensor=2", "--rank", "2"]):
        result = CliRunner().invoke(app, ["inspect", str(tiny_bundle), *wrong])
        assert result.exit_code == 2
    result = CliRunner().invoke(app, ["inspect", str(tiny_bundle), "--program", "--partition", "rows=2"])
    assert result.exit_code != 0 and "isn't understood" in result.output


def test_the_weights(tiny_bundle: Path) -> None:
    data = json.loads(inspect(str(tiny_bundle), "--weights", "--json"))
    lines = inspect(str(tiny_bundle), "--weights").splitlines()
    assert len(lines) == len(data) > 10
    assert any("panel32" in line for line in lines)


def test_the_passes(tiny_bundle: Path) -> None:
    data = json.loads(inspect(str(tiny_bundle), "--passes", "--json"))
    lines = inspect(str(tiny_bundle), "--passes").splitlines()
    assert len(lines) == len(data) + 1
    assert {p["name"]: p["matched"] for p in data}["fuse_gate_up"] == 2


def test_two_views_at_once_are_refused(tiny_bundle: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(tiny_bundle), "--program", "--weights"])
    assert result.exit_code == 2
    result = CliRunner().invoke(app, ["inspect", str(tiny_bundle), "--target", "cpu"])
    assert result.exit_code == 2
    assert "--program" in result.stderr


@pytest.mark.parametrize("damage", ["missing", "truncated", "too new"])
def test_a_damaged_bundle(damage: str, tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "damaged.bundle"
    if damage != "missing":
        shutil.copytree(tiny_bundle, bundle)
        manifest = bundle / "manifest.json"
        text = manifest.read_text()
        new = (
            text[: len(text) // 2]
            if damage == "truncated"
            else text.replace('"format_version": 2', '"format_version": 99')
        )
        assert new != text
        manifest.write_text(new)
    result = CliRunner().invoke(app, ["inspect", str(bundle), "--json"])
    assert result.exit_code == 7
    assert json.loads(result.stdout)["error"]["type"] == "BundleError"
    assert str(bundle) in result.stderr


def test_a_target_that_is_not_there(tiny_bundle: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(tiny_bundle), "--program", "--target", "onnx"])
    assert result.exit_code == 7
    assert "no target 'onnx'; it has cpu" in result.stderr


def test_a_name_does_not_speak_to_the_terminal(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "b"))
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["model"]["name"] = "x\x1b]0;title\x07\x1b[31m\u202e\x9b2J"
    manifest["toolchain"] = {"tool\x1b[2J": "1\x1b[2J"}
    manifest["recipe"]["name"] = "\x1b[2J"
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    runner = CliRunner()
    for command in (
        ["inspect"],
        ["inspect", "--json"],
        ["doctor"],
        ["verify"],
        ["report"],
        ["sbom"],
        ["bench", "-t", "tvm"],
    ):
        result = runner.invoke(app, [command[0], str(bundle), *command[1:]])
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(result.output), command
    assert r"x\x1b]0;title\x07" in inspect(str(bundle))


def test_the_hash_and_what_a_target_carries(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = with_target(Path(shutil.copytree(tiny_bundle, tmp_path / "b")), "tvm")
    text, data = inspect(str(bundle)), json.loads(inspect(str(bundle), "--json"))
    assert "carries compiled libraries: they run only with --trust" in text
    assert data["hash"] == Bundle.open(bundle).hash and data["hash"] in text
    assert [data["targets"][name]["carries"] for name in ("cpu", "tvm")] == [None, "compiled libraries"]
    refused = CliRunner().invoke(app, ["generate", str(bundle), "hi", "--target", "tvm"])
    assert refused.exit_code == 7 and "--trust code" in refused.output and data["hash"] in refused.output


def test_a_rank_without_a_partition_is_refused(tiny_bundle: Path) -> None:
    for arguments in (("--rank", "1"), ("--program", "--rank", "0")):
        result = CliRunner().invoke(app, ["inspect", str(tiny_bundle), *arguments])
        assert result.exit_code == 2 and "--rank says whose part" in result.output
