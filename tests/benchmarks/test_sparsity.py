"""The benchmark of 2:4 sparsity, small: bytes that are saved, ratios of each round, and KL by each method."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "sparsity.py"
KERNELS = ["--rows", "64", "--rounds", "2", "--threads", "1", "--storages", "int8"]
MODEL = ["--storage", "int8", "--methods", "dense", "magnitude", "wanda", "--tokens", "512"]


def test_kernels_and_model_have_figures(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "folder" / "out.json"
    command = [sys.executable, str(SCRIPT), *KERNELS, "--model", str(tiny_folder), *MODEL, "--output", str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    (row,) = figures["kernels"]
    # Of four bytes, two and half a byte of places; scales of 2 bytes for each 32 weights on both sides.
    assert row["bytes_share"] == pytest.approx((0.625 * 32 + 2) / (32 + 2), rel=0.01)
    assert (row["storage"], row["rows"], len(row["ratios"])) == ("int8", 64, 2)
    assert 0 < min(row["ratios"]) <= row["ratio"] <= max(row["ratios"]) and row["gigabytes_per_second"] > 0
    kl = figures["model"]
    assert set(kl) == {"dense", "magnitude", "wanda"}
    assert 0 < kl["dense"] < min(kl["magnitude"], kl["wanda"])  # to leave out half of the weights costs more
    assert "int8" in done.stdout and "x (" in done.stdout
