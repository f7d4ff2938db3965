"""The benchmark of single linears, small: every row has figures, and the bytes and products are those of the shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "linear.py"


def test_rows_have_figures(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "out.json"
    arguments = ["--model", "smol", "--storages", "int8", "bf16", "--rows", "2", "70", "--layers", "2"]
    command = [sys.executable, str(SCRIPT), *arguments, "--rounds", "3", "--threads", "1", "--output", str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    int8, bf16 = json.loads(out.read_text())
    assert int8["bandwidth"] > 0 and int8["peak"] > 0
    assert [(r["linear"], r["rows"]) for r in bf16["rows"]] == [
        (kind, rows) for kind in ("qkv", "o", "gate_up", "down", "head") for rows in (2, 70)
    ]
    assert all(len(r["rounds"]) == 3 and 0 < min(r["rounds"]) <= r["seconds"] for r in int8["rows"])
    few, many = int8["rows"][:2]
    assert few["bytes"] == many["bytes"] == 2 * 960 * (576 + 576 // 32 * 2)  # two layers, a scale for each 32
    assert few["multiply_adds"] == 2 * 2 * 960 * 576 and many["multiply_adds"] == 70 * 2 * 960 * 576
    assert [r["multiply_adds"] for r in int8["rows"][-2:]] == [2 * 49152 * 576, 49152 * 576]  # a prefill's head: 1 row
    assert done.stdout.count("tokens/s if there were only linears") == 4
