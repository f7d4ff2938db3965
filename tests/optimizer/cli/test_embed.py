"""``optimize embed``: the vectors of a file's texts, in each format, also after it was interrupted."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import enginewright as ew
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.embed import outputs
from tests.runtime.server.conftest import START
from tests.text_models import PROMPTS

TEXTS = ["A ship at sea.", "Ein Käse", "x y " * 12, "the last one"]
WIDTH = 32


@pytest.fixture
def bundle(pooled_bundles: dict[str, Path]) -> Path:
    return pooled_bundles["embed"]


def embed(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["embed", *map(str, arguments)])


def written(path: Path, texts: list[str], field: str | None = None) -> Path:
    lines = texts if field is None else [json.dumps({"id": i, field: text}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def expected(bundle: Path, texts: list[str], **options: Any) -> np.ndarray[Any, Any]:
    with ew.LLM(bundle) as llm:
        return llm.embed(texts, **options)


def test_lines_of_text_to_an_array(bundle: Path, tmp_path: Path) -> None:
    file, out = written(tmp_path / "texts.txt", TEXTS), tmp_path / "out.npy"
    result = embed(bundle, file, "-o", out)
    assert result.exit_code == 0, result.output
    assert f"4 vectors of {WIDTH} numbers" in result.stdout
    vectors = np.load(out)
    assert vectors.dtype == np.float32 and np.array_equal(vectors, expected(bundle, TEXTS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.npy", "texts.txt"]


def test_a_field_of_json_to_json(bundle: Path, tmp_path: Path) -> None:
    file, out = written(tmp_path / "texts.jsonl", TEXTS, "question"), tmp_path / "out.jsonl"
    options = ("--field", "question", "--prompt", "query", "--no-normalize", "--json")
    result = embed(bundle, file, "-o", out, *options)
    assert result.exit_code == 0, result.output
    about = json.loads(result.stdout)
    assert (about["texts"], about["resumed"], about["dimensions"]) == (4, 0, WIDTH)
    assert about["output"] == str(out) and about["texts_per_second"] > 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["text"] for row in rows] == TEXTS
    result_rows = np.array([row["embedding"] for row in rows], np.float32)
    assert np.array_equal(result_rows, expected(bundle, TEXTS, prompt="query", normalize=False))
    assert "query" in PROMPTS


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow isn't installed")
def test_parquet(bundle: Path, tmp_path: Path) -> None:
    from pyarrow import parquet

    file, out = written(tmp_path / "texts.txt", TEXTS), tmp_path / "out.parquet"
    result = embed(bundle, file, "-o", out)
    assert result.exit_code == 0, result.output
    table = parquet.read_table(out)
    assert table.column("text").to_pylist() == TEXTS
    result_rows = np.array(table.column("embedding").to_pylist(), np.float32)
    assert np.array_equal(result_rows, expected(bundle, TEXTS))


def test_parquet_without_its_package(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = embed(bundle, written(tmp_path / "texts.txt", TEXTS), "-o", tmp_path / "out.parquet")
    assert result.exit_code == 10
    assert "pip install 'enginewright[parquet]'" in result.stderr


def test_ctrl_c_keeps_the_vectors_and_the_next_run_continues(bundle: Path, tmp_path: Path) -> None:
    texts = [f"{chr(97 + i % 26)} {'x y ' * (1 + i % 9)}" for i in range(6000)]
    file, out, part = written(tmp_path / "texts.txt", texts), tmp_path / "out.npy", tmp_path / "out.npy.part"
    words = ["embed", str(bundle), str(file), "-o", str(out), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", START, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (part.exists() and part.stat().st_size > 1000 * 4 * WIDTH):
        assert process.poll() is None, process.communicate()
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "of 6,000 vectors are in" in errors and not out.exists()
    with part.open("ab") as cut:  # a row that was being written when the machine stopped
        cut.write(b"abc")
    result = embed(bundle, file, "-o", out, "--json")
    assert result.exit_code == 0, result.output
    about = json.loads(result.stdout)
    assert about["resumed"] >= 1024 and about["texts"] == 6000
    assert not part.exists()
    assert np.array_equal(np.load(out), expected(bundle, texts))


def test_another_file_or_option_does_not_continue(bundle: Path, tmp_path: Path) -> None:
    file, out = written(tmp_path / "texts.txt", TEXTS), tmp_path / "out.npy"
    (tmp_path / "out.npy.part").write_bytes(b'{"texts":"of another file"}\n' + bytes(4 * WIDTH))
    result = embed(bundle, file, "-o", out)
    assert result.exit_code != 0
    assert "it is of other texts, another bundle or other options" in result.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", (), "texts.txt: it is empty"),
        (b"a\n\nb\n", (), "texts.txt:2: it is empty"),
        (b"a\n\xff\n", (), "texts.txt:2: it isn't in UTF-8"),
        (b"a\nb\n", ("--field", "text"), "texts.txt:1: it isn't JSON"),
        (b'{"text": "a"}\n{"text": 5}\n', ("--field", "text"), "texts.txt:2: its field 'text' is 5"),
        (b'{"text": "a"}\n[]\n', ("--field", "text"), "texts.txt:2: it isn't an object"),
        (b"a\n" + b"b " * 500 + b"\n", (), "texts.txt:2: "),
        (b"a\n", ("--prompt", "poem"), "prompt: the model has no prompt 'poem'"),
        (b"a\n", ("--dimensions", "5"), "dimensions: 5"),
    ],
)
def test_what_is_wrong_is_named(
    bundle: Path, tmp_path: Path, content: bytes, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "texts.txt").write_bytes(content)
    result = embed(bundle, tmp_path / "texts.txt", "-o", tmp_path / "out.npy", *options)
    assert result.exit_code not in (0, 1), result.output
    assert message in result.stderr


def test_outputs_and_models_of_other_kinds(bundle: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "texts.txt", TEXTS)
    assert "its name doesn't say what it is" in embed(bundle, file, "-o", tmp_path / "out.bin").stderr
    assert "there is no folder" in embed(bundle, file, "-o", tmp_path / "nowhere" / "out.npy").stderr
    assert "a file of the bundle" in embed(bundle, file, "-o", bundle / "out.npy").stderr
    assert "'generate'" in embed(tiny_bundle, file, "-o", tmp_path / "out.npy").stderr
    assert "can't be read" in embed(bundle, tmp_path / "none.txt", "-o", tmp_path / "out.npy").stderr
    assert {".npy", ".jsonl", ".parquet"} == {*outputs._WRITERS}


def test_texts_that_are_too_long_are_cut_where_that_is_asked_for(bundle: Path, tmp_path: Path) -> None:
    file, out = written(tmp_path / "texts.txt", ["a " * 500, "b"]), tmp_path / "out.npy"
    assert embed(bundle, file, "-o", out, "--truncate").exit_code == 0
    assert np.array_equal(np.load(out), expected(bundle, ["a " * 500, "b"], truncate=True))
