"""The benchmark of pruning on a tiny model: every bundle has a row, and what is saved is of whole and pruned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "pruning.py"
SMALL = ["--rounds", "2", "--prompt", "20", "--steps", "3", "--threads", "1", "--share", "0.5", "--recipes", "f32"]


def test_whole_and_pruned_have_rows(tiny_folder: Path, tmp_path: Path) -> None:
    page, out, text = tmp_path / "page.md", tmp_path / "out.json", tmp_path / "text.txt"
    page.write_text("before\n<!-- table: benchmarks/pruning.py -->\nold\n<!-- end of table -->\nafter\n")
    text.write_text("Some words to be wrong about, again and again, and other ones that are as good. " * 12)
    command = [
        sys.executable,
        str(SCRIPT),
        "--model",
        str(tiny_folder),
        *SMALL,
        "--text",
        str(text),
        "--json",
        str(out),
    ]
    command += ["--calibration", str(text), "--folder", str(tmp_path / "bundles"), "--page", str(page), "--update-docs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {(row["recipe"], row["kind"]): row for row in json.loads(out.read_text())["results"]}
    assert len(rows) == 3
    whole, pruned = rows["f32", "whole"], rows["f32", "pruned"]
    assert whole["parameters"] - pruned["parameters"] == 2 * 64 * 3 * 64
    assert pruned["bytes_saved"] == pytest.approx(1 - pruned["step_bytes"] / whole["step_bytes"])
    assert pruned["bytes_saved"] > 0.1
    assert len(pruned["time_saved_by_round"]) == len(pruned["speeds"]) == 2
    assert pruned["time_for_bytes"] == pytest.approx(pruned["time_saved"] / pruned["bytes_saved"])
    assert pruned["kl_mean"] > 0
    assert rows["f32", "pruned, nothing compensated"]["kl_mean"] > 0
    assert rows["f32", "whole"]["kl_mean"] is None
    before, table, after = page.read_text().partition("| recipe |")
    assert before.startswith("before") and "old" not in table + after and after.endswith("after\n")


def test_a_page_without_a_place_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("no marks\n")
    command = [sys.executable, str(SCRIPT), "--page", str(tmp_path / "page.md"), "--update-docs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "the marks" in done.stderr
