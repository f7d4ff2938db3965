"""``optimize export --lora``: through the command, the bundle, and what reads it afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app
from enginewright.optimizer.export.check_arguments import ExportArguments
from enginewright.optimizer.export.run import _key
from enginewright.runtime.bundle.reader import Bundle
from tests.conftest import make_tiny_model
from tests.optimizer.capture.adapters import load, merged_by_peft, save_adapter
from tests.optimizer.capture.gguf.test_model import write

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with "base", a tiny model with a tokenizer, and the adapters "one" and "two"."""
    place = tmp_path_factory.mktemp("adapters")
    shutil.copytree(tiny_folder, place / "base")
    save_adapter(load(place / "base"), place / "one", target_modules=["q_proj", "down_proj"])
    save_adapter(load(place / "base"), place / "two", seed=2, target_modules=["v_proj"], use_dora=True)
    return place


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in the folder of adapters."""
    monkeypatch.chdir(folder)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def test_a_bundle_has_the_merged_weights_and_names_its_adapters(run: Run, folder: Path, tmp_path: Path) -> None:
    bundle, adapters = tmp_path / "b.bundle", ("--lora", "one", "--lora", "two=0.5")
    result = run("export", "base", *adapters, "-o", bundle, "--recipe", "f32", "--json", "--quiet")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["verification"][0]["exact"]
    merged = merged_by_peft(folder / "base", [(folder / "one", 1.0), (folder / "two", 0.5)])
    stored = Bundle.open(bundle).weight("model.layers.0.mlp.down_proj.weight")
    value = torch.from_numpy(stored.copy()).mT.reshape(64, 128)  # from panels of 32 rows [2, 128, 32]
    torch.testing.assert_close(value, merged["model.layers.0.mlp.down_proj.weight"], rtol=1e-5, atol=1e-6)

    named = [(one.name, one.weight) for one in Bundle.open(bundle).manifest.source.adapters]
    assert named == [("one", 1.0), ("two", 0.5)]
    assert "adapter     two, weight 0.5, sha256 " in run("inspect", bundle).stdout
    assert [a["name"] for a in json.loads(run("inspect", bundle, "--json").stdout)["source"]["adapters"]] == [
        "one",
        "two",
    ]

    assert run("verify", bundle, "--source", "base", *adapters).exit_code == 0
    for options, message in (
        ((), "was made with the adapter one (weight 1), which isn't given"),
        (("--lora", "one", "--lora", "two"), "with the adapter two at weight 0.5, and 1 is given"),
    ):
        result = run("verify", bundle, "--source", "base", *options)
        assert result.exit_code != 0 and message in result.stderr.replace("\n", " "), result.output
    result = run("bisect", "base", bundle)
    assert result.exit_code != 0 and "was made with adapters (one, two), and base is read without" in result.stderr


def test_a_kept_export_is_of_the_same_adapters_and_weights(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "one", tmp_path / "one")

    def key(*adapters: str) -> str | None:
        arguments = ExportArguments(source=folder / "base", lora=[f"{tmp_path}/{name}" for name in adapters])
        return _key(arguments, None, least=0)

    keys = [key(), key("one"), key("one=0.5")]
    assert None not in keys and len(set(keys)) == 3 and key("one") == keys[1]
    config = json.loads((tmp_path / "one/adapter_config.json").read_text())
    (tmp_path / "one/adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 4}))
    assert key("one") not in keys


@pytest.mark.matrix
def test_a_quantized_file_keeps_the_blocks_that_no_adapter_changes(run: Run, folder: Path, tmp_path: Path) -> None:
    write(make_tiny_model("Llama"), tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    save_adapter(make_tiny_model("Llama"), tmp_path / "adapter", target_modules=["q_proj"])
    output = ("-o", tmp_path / "b.bundle", "--json", "--quiet")
    result = run("export", tmp_path / "tiny.gguf", "--lora", tmp_path / "adapter", *output)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["recipe"] == "gguf" and 0 < report["quantization"]["kept"] < report["quantization"]["values"]


def test_an_adapter_beside_a_recovery_or_a_missing_source_is_refused(run: Run, folder: Path, tmp_path: Path) -> None:
    for words, message in (
        (("export", "base", "--lora", "one", "--recovered", "some"), "--lora: a recovery has weights of its own"),
        (("export", "base", "--lora", "one", "-o", "one/b.bundle"), "the adapter one"),
        (("export", "one"), "optimize export MODEL --lora one"),
        (("verify", tmp_path, "--lora", "one"), ""),
    ):
        result = run(*words)
        assert result.exit_code != 0 and message in result.stderr, result.output
