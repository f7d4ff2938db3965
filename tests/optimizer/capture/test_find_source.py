from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from enginewright.optimizer.capture.find_source import describe_source, find_source, model_name, older_reader
from enginewright.optimizer.capture.gguf.header import READER_VERSION
from enginewright.runtime.bundle.manifest import HubSection, SourceSection
from enginewright.runtime.shared.errors import SourceError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("name", ["org/model", "org/model:Q4_0", "org/model@main"])
def test_what_is_here_is_meant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir(parents=True)
    assert find_source(name) == Path(name)
    with pytest.raises(SourceError, match="revision 'main' is for models of the Hub"):
        find_source(name, revision="main")


def test_what_is_missing_is_named_with_its_option() -> None:
    with pytest.raises(SourceError, match=r"against: no/such/folder doesn't exist(?s:.*)org/name"):
        find_source("no/such/folder", option="against")
    with pytest.raises(SourceError, match="names a revision, and 'b' is given too"):
        find_source("org/model@a", revision="b")


@pytest.mark.parametrize("revision", ["../../etc", "-x", "a..b", "/a"])
def test_a_revision_is_no_path_out_of_the_cache(revision: str) -> None:
    with pytest.raises(SourceError, match="can't be a revision"):
        find_source("org/model", revision=revision)


def test_a_snapshot_of_the_cache_says_where_it_is_from(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--my-model" / "snapshots" / COMMIT
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.gguf").write_bytes(b"GGUF")
    hub = HubSection(id="org/my-model", commit=COMMIT)
    assert describe_source(folder) == SourceSection(kind="huggingface", name="org/my-model", hub=hub)
    assert describe_source(folder / "sub" / "a.gguf") == SourceSection(
        kind="gguf", name="a.gguf", hub=hub, reader=READER_VERSION
    )
    (tmp_path / "link").symlink_to(folder)
    assert describe_source(tmp_path / "link").hub == hub
    (tmp_path / "models--org--my-model" / "snapshots" / "main").mkdir()
    assert describe_source(tmp_path / "models--org--my-model" / "snapshots" / "main").hub is None
    assert describe_source(folder / "sub").name == "org/my-model/sub"


@pytest.mark.parametrize(
    ("kind", "reader", "older"),
    [("gguf", None, True), ("gguf", 1, True), ("gguf", READER_VERSION, False), ("huggingface", None, False)],
)
def test_a_bundle_of_an_older_gguf_reader(
    kind: Literal["gguf", "huggingface"], reader: int | None, older: bool
) -> None:
    note = older_reader(SourceSection(kind=kind, name="a.gguf", reader=reader))
    assert (note is not None) == older
    assert note is None or "a.gguf was read by an older version of the GGUF reader (1;" in note


@pytest.mark.parametrize(
    ("file", "inside", "name"),
    [
        ("Big-Q4_K_M-00001-of-00003.gguf", "Big", "Big"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Smollm2 135M 8k Lc100K Mix1 Ep2", "SmolLM2-135M-Instruct"),
        ("gemma-3-270m-it-Q4_K_M.gguf", "Gemma 3", "gemma-3-270m-it"),
        ("Llama-3.2-1B_UD-IQ3_XXS.GGUF", None, "Llama-3.2-1B"),
        ("tiny.bf16.gguf", None, "tiny"),
        ("phi-3.5.gguf", None, "phi-3.5"),
        ("Q8_0.gguf", "Llama", "Q8_0"),
        ("model.gguf", "Llama 3.2", "Llama 3.2"),
        ("ggml-model-f16.gguf", "Llama 3.2", "Llama 3.2"),
        ("ggml-model-f16.gguf", None, "ggml-model-f16"),
        ("model", None, "model"),
    ],
)
def test_a_model_is_called_as_its_file(file: str, inside: str | None, name: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    assert model_name(tmp_path / file, inside) == name


def test_a_model_is_called_as_its_folder_or_its_id(tmp_path: Path) -> None:
    (tmp_path / "Llama-1B.Q4_0").mkdir()
    assert model_name(tmp_path / "Llama-1B.Q4_0", "inside") == "Llama-1B.Q4_0"
    snapshot = tmp_path / f"models--org--Llama-1B/snapshots/{COMMIT}"
    snapshot.mkdir(parents=True)
    assert model_name(snapshot) == "Llama-1B"
