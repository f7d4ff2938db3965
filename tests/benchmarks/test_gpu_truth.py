"""benchmarks/gpu_truth.py, rehearsed: what can run without a GPU runs, and what fails is said and stops nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[cuda]'")


def run(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "benchmarks" / "gpu_truth.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.soak
def test_a_rehearsal(repository: Path, tmp_path: Path) -> None:
    packed, output = tmp_path / "packed", tmp_path / "found.jsonl"
    done = run(repository, "pack", str(packed), "--rehearse")
    assert done.returncode == 0, done.stderr
    for stage in "ABC":
        done = run(repository, stage, "--packed", str(packed), "--output", str(output), "--rehearse")
        found = [json.loads(line) for line in output.read_text().splitlines()]
        assert [record for record in found if "error" in record] == []
        assert done.returncode == 0
    by_part: dict[str, list[dict[str, object]]] = {}
    for record in found:
        by_part.setdefault(record["part"], []).append(record)
    assert {"facts", "roofs", "kernels", "tokens", "steps 1b", "steps 8b"} <= set(by_part)
    assert [record["equal"] for record in by_part["tokens"] if "equal" in record] == [True]
    assert sum(int(str(record.get("read", 0))) for record in by_part["kernels"]) > 20
    assert len([record for record in by_part["steps 1b"] if "ms" in record]) == 4

    (packed / "tokens.json").unlink()  # a part that fails is a line, and the next one runs
    again = tmp_path / "again.jsonl"
    done = run(repository, "B", "--packed", str(packed), "--output", str(again), "--rehearse")
    found = [json.loads(line) for line in again.read_text().splitlines()]
    assert done.returncode == 1
    assert [record["part"] for record in found if "error" in record] == ["tokens"]
    assert any(record["part"] == "steps 8b" and "ms" in record for record in found)


def test_what_is_missing_is_said(repository: Path, tmp_path: Path) -> None:
    assert "the folder doesn't exist" in run(repository, "A", "--packed", str(tmp_path / "none")).stderr
    assert "isn't there yet" in run(repository, "pack", str(tmp_path)).stderr
    done = run(repository, "A", "--packed", str(tmp_path), "--only", "roof")
    assert "stage A has no roof" in done.stderr
