"""A model in place of a bundle: exported once, into the cache, by every command that runs one, and by ``LLM``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from typer.testing import CliRunner

import enginewright as ew
from enginewright.optimizer.cli import exported as module
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.cli.exported import exported
from enginewright.optimizer.export.kept_exports import KeptExports
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError, EnginewrightError, RequestError, SourceError
from tests.conftest import make_tiny_model
from tests.optimizer.capture.gguf.test_model import write

PLAIN = "int8, as no recipe is named and the model isn't a quantized GGUF file"


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptExports:
    """An empty cache. Children of a test compute other keys where the working tree changes meanwhile."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return KeptExports.of_user()


def messages(printed: str) -> list[str]:
    """The lines that aren't about progress, which come after seconds."""
    return [line for line in printed.splitlines() if not line.startswith("[")]


@pytest.mark.matrix
def test_the_line_names_recipe_and_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(make_tiny_model("Llama"), tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    for _ in range(2):  # the second time it is kept
        bundle = Bundle.open(exported(path, apart=False))
        assert bundle.manifest.recipe["name"] == "gguf"
        printed = capsys.readouterr()
        assert messages(printed.err) == [f"{path}: recipe gguf, as the file is quantized"] and printed.out == ""
    assert exported(path, quiet=True, apart=False) == bundle.path
    assert Bundle.open(exported(path, recipe="int8", apart=False)).manifest.recipe["name"] == "int8"
    assert messages(capsys.readouterr().err) == []


def test_commands_and_python_run_a_model(
    tiny_folder: Path, kept: KeptExports, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(tiny_folder)
    exported(tiny_folder, apart=False)  # the examples of generate's page export in a process of their own
    assert messages(capsys.readouterr().err) == [f"{name}: recipe {PLAIN}"]
    lines: dict[tuple[str, ...], str] = {
        ("generate", name, "Hello", "-n", "4", "--json"): "",
        ("chat", name, "-n", "4", "--json"): "Hello\n",
        ("eval", name, "--window", "16", "--text", __file__, "--json"): "",
        ("bench", name, "--prompt", "8", "--batch", "none", "--steps", "1", "--rounds", "1", "--json"): "",
    }
    for line, text in lines.items():
        result = CliRunner().invoke(app, line, input=text)
        assert result.exit_code == 0, result.output
        assert messages(result.stderr)[0] == f"{name}: recipe {PLAIN}"
        json.loads(result.stdout)
    (entry,) = kept.entries()
    assert entry.recipe == "int8"
    with ew.LLM(tiny_folder) as llm:
        assert llm.generate("Hello", ew.SamplingParams(max_tokens=1))[0].token_ids
        assert llm.model.name == tiny_folder.name
    assert messages(capsys.readouterr().err) == [f"{name}: recipe {PLAIN}"]
    assert kept.entries() == [entry]


@pytest.mark.parametrize("command", ["generate", "chat", "eval", "bench", "serve"])
def test_a_bundle_has_its_recipe(command: str, tiny_bundle: Path) -> None:
    prompt = ["Hello"] if command == "generate" else []
    result = CliRunner().invoke(app, [command, str(tiny_bundle), *prompt, "--recipe", "int8"])
    assert result.exit_code == 2 and "--recipe: " in result.stderr, result.output
    assert "the model that the bundle was made from" in result.stderr or "a bundle was made from" in result.stderr


def test_in_python_too(tiny_bundle: Path) -> None:
    with pytest.raises(RequestError, match=r"recipe: .* isn't a model that is exported first"):
        ew.LLM(tiny_bundle, recipe="int8")
    with pytest.raises(RequestError, match="must be a recipe's name or file"):
        ew.LLM(tiny_bundle, recipe=8)  # type: ignore[arg-type]
    assert exported(tiny_bundle) == tiny_bundle


@pytest.mark.parametrize("command", ["generate", "chat", "eval", "bench", "serve"])
@pytest.mark.parametrize("model", ["./modle.gguf", "./modle.bundle", "some/long/path"])
def test_a_missing_path_is_named_with_all_that_could_be_passed(
    command: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    result = CliRunner().invoke(app, [command, model, *(["Hello"] if command == "generate" else [])])
    shown = " ".join(result.stderr.split())
    assert result.exit_code == BundleError.exit_code and f"{model} doesn't exist" in shown
    assert "Pass a bundle, a GGUF file, a Hugging Face folder, or a model's id on the Hub, such as org/name." in shown
    assert ("Did you mean model.gguf?" in shown) == (model == "./modle.gguf"), shown


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import enginewright
try:
    enginewright.LLM(sys.argv[1])
except enginewright.MissingDependencyError as e:
    print(e)
"""


def test_what_exports_is_named_where_it_is_missing(tiny_folder: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tiny_folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert f"{tiny_folder} isn't a bundle, and exporting it needs torch" in done.stdout
    assert "pip install 'enginewright[export]'; or pass a bundle" in done.stdout


FAILS = """
import pickle, sys
from enginewright.runtime.shared.errors import SourceError
pickle.dump(SourceError("damaged", hint="Download it again."), sys.stdout.buffer)
"""


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [("os._exit(9)", EnginewrightError, r"exit code 9"), (FAILS, SourceError, r"damaged\n  Download it")],
)
def test_the_other_process_s_end(
    run: str, error: type[Exception], message: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHILD", ("-c", f"import os; {run}"))
    with pytest.raises(error, match=message):
        exported(tiny_folder, quiet=True)
