from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.cli.export import default_output
from enginewright.runtime.bundle.hub_id import HubId, check_there, is_model, parse_hub_id
from enginewright.runtime.shared.errors import BundleError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/model", HubId("org/model")),
        ("org/model@v1.0", HubId("org/model", "v1.0")),
        ("org/model:Q4_K_M", HubId("org/model", None, "Q4_K_M")),
        ("org/model@refs/pr/1:sub/model-q8_0.gguf", HubId("org/model", "refs/pr/1", "sub/model-q8_0.gguf")),
        ("org/model-GGUF", HubId("org/model-GGUF")),
        ("org/model.gguf:Q4_0", HubId("org/model.gguf", None, "Q4_0")),
        ("models/llama.gguf", None),  # a file that is missing
        ("models/smollm2.bundle", None),
        ("model", None),
        ("./model", None),
        ("../model", None),
        ("/models/model", None),
        ("models/org/model", None),
        ("org/.model", None),
        ("org/model:", None),
        ("org/model@", None),
        ("org/mo del", None),
        ("orgä/model", None),
        ("https://huggingface.co/org/model", None),
    ],
)
def test_what_is_an_id(text: str, expected: HubId | None) -> None:
    assert parse_hub_id(text) == expected
    if expected is not None:
        assert str(expected) == text


@pytest.mark.parametrize(
    ("source", "bundle"),
    [
        ("org/model", "model.bundle"),
        ("org/model@v1", "model.bundle"),
        ("org/model-GGUF:Q4_K_M", "model-GGUF-Q4_K_M.bundle"),
        ("org/model-GGUF@main:sub/model-q8_0.gguf", "model-q8_0.bundle"),
        ("models/llama.gguf", "llama.bundle"),
        ("/a/b/llama/", "llama.bundle"),
    ],
)
def test_what_a_bundle_is_called(source: str, bundle: str) -> None:
    assert default_output(source) == Path(bundle)


@pytest.mark.parametrize(
    ("files", "path", "model"),
    [
        (["m/config.json"], "m", True),
        (["m/model-Q8_0.GGUF"], "m", True),
        (["m/adapter_config.json"], "m", True),
        (["m/config.json", "m/manifest.json"], "m", False),
        (["m/manifest.json"], "m", False),
        (["m/notes.txt"], "m", False),
        (["m.gguf/notes.txt"], "m.gguf", True),
        (["m.gguf/notes.txt"], "m.gguf/", True),
        (["m.gguf"], "m.gguf", True),
        (["blob"], "blob", True),
        (["empty"], "empty", False),
        ([], "missing.gguf", True),
        ([], "missing.bundle", False),
        ([], "missing", False),
        ([], "org/name", True),
        ([], "org/name@main:Q8_0", True),
        (["org/name/notes.txt"], "org/name", False),
    ],
)
def test_what_is_exported_first(
    files: list[str], path: str, model: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in files:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_bytes(b"" if file == "empty" else b"GGUF....")
    assert is_model(path) == is_model(Path(path)) == model


def test_a_folder_or_file_of_neither_kind_is_refused_with_all_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    for path, message in (
        (tmp_path, "is neither a bundle nor a model: it has neither manifest.json nor config.json"),
        (tmp_path / "notes.txt", "is a file, but no GGUF file"),
        (tmp_path / "missing", "doesn't exist"),
    ):
        with pytest.raises(BundleError, match=message) as e:
            check_there(path)
        assert e.value.hint is not None and e.value.hint.startswith("Pass a bundle, a GGUF file, a Hugging Face folder")
    (tmp_path / "config.json").write_text("{}")
    check_there(tmp_path)
    check_there("org/model")
