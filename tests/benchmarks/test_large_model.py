"""A model exported within less memory than its weights take as floats, as the operating system counts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "large_model.py"
LIMIT = 720_000_000


@pytest.mark.soak
def test_a_tight_limit_is_kept(tmp_path: Path) -> None:
    """The weights take 265 MB as float32, and the process some 520 MB before it has read any: torch loads
    Triton, and transformers SciPy, which tests have installed."""
    command = [
        sys.executable,
        str(SCRIPT),
        str(tmp_path / "work"),
        "--gib",
        "0.12",
        "--hidden",
        "768",
        "--context",
        "48",
    ]
    command += ["--max-memory", str(LIMIT), "--output", str(tmp_path / "figures.json")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert 2 * figures["model_bytes"] > LIMIT / 3
    assert figures["peak_bytes"] <= LIMIT
    assert figures["reported"]["kept"]
    # The system's figure for the process that ended is the one that it reported itself.
    assert abs(figures["reported"]["peak"] - figures["peak_bytes"]) < 0.05 * LIMIT
    assert list((tmp_path / "work").iterdir()) == []  # nothing is left
