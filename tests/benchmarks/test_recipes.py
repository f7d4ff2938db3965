"""The table of recipes is made on a tiny model: every recipe has a row, also one that can't be made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "recipes.py"
BEGIN, END = "<!-- table: benchmarks/recipes.py -->", "<!-- end of table -->"
SMALL = ["--rounds", "2", "--prompt", "20", "--short-prompt", "8", "--steps", "3", "--batch", "2", "--threads", "1"]


def test_every_recipe_has_a_row(tiny_folder: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    page, out, text = tmp_path / "page.md", tmp_path / "out.json", tmp_path / "text.txt"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    text.write_text("Some words to be wrong about, again and again.")
    command = [sys.executable, str(SCRIPT), "--model", str(tiny_folder), "--recipes", "int8", "gguf", *SMALL]
    command += ["--text", str(text), "--folder", str(tmp_path / "bundles"), "--json", str(out)]
    command += ["--page", str(page), "--update-docs", "--beside", f"before={tiny_bundle}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "failed: gguf" in done.stderr

    result = json.loads(out.read_text())
    exact, gguf, narrow, before = result["results"]
    assert [row["recipe"] for row in result["results"]] == ["f32", "gguf", "int8", "before"]
    assert "no weight of this model is stored in blocks" in gguf["failure"]
    assert exact["kl_mean"] is None
    assert 0 < narrow["kl_mean"] < 0.05
    assert 0 <= narrow["same_answers"] <= 1
    assert before["kl_mean"] == 0  # the same model in floats
    assert before["same_answers"] == 1
    assert before["perplexity"] == exact["perplexity"]
    assert narrow["weight_bytes"] < exact["weight_bytes"] / 2
    for row in (exact, narrow, before):
        assert len(row["speeds"]) == 2
        assert row["bundle_bytes"] > row["weight_bytes"] > row["parameters"]
        assert all(speed > 0 for speed in row["tokens_per_second"].values())
    assert set(exact["ratio"].values()) == {1.0}

    start, _, rest = page.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    assert (start, after) == ("before\n", "\nafter\n")
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == ["f32", "gguf", "int8", "before"]
    assert "failed: weights.keep_blocks is true" in rows[1]
    assert "old" not in table
    assert table.strip() in done.stdout


@pytest.mark.parametrize(
    "arguments", [["--recipes", "int9"], ["--page", "page.md", "--update-docs"], ["--beside", "old=nowhere"]]
)
def test_what_can_not_be_done_is_said_before_the_work(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("no marks\n")
    command = [sys.executable, str(SCRIPT), *arguments, "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "invalid choice" in done.stderr or "the marks" in done.stderr or "isn't NAME=PATH" in done.stderr
    assert not (tmp_path / "out.json").exists()
