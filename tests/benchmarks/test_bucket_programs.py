"""Each bucket's program beside that of any size: a row of figures for each; programs that differ aren't a success."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from enginewright.plugins.cpu.executable import CpuProgram
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import StepInput, StepOutput

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bucket_programs.py"


def test_a_row_for_each_bucket(tiny_bundle: Path, tmp_path: Path) -> None:
    options = ["--threads", "1", "--rounds", "2", "--context", "20", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run([sys.executable, str(SCRIPT), str(tiny_bundle), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    longest = Bundle.open(tiny_bundle).model.context_length
    wanted = [f"tokens-{n}" for n in (128, 512) if n <= longest] + ["batch-1", "batch-8", "batch-32"]
    assert [row["name"] for row in rows] == wanted == [line.split()[0] for line in done.stdout.splitlines()[1:]]
    for row in rows:
        assert len(row["seconds"]) == len(row["ratios"]) == 2 and min(row["seconds"] + row["ratios"]) > 0
        assert 0 < row["arena_bytes"] <= row["arena_bytes_any"] and row["load_seconds"] > 0


def test_other_bits_are_no_success(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import bucket_programs

    class Other(CpuProgram):
        def run(self, step: StepInput) -> StepOutput:
            output = super().run(step)
            if output.logits is not None:
                output.logits[0, 0] += 1
            return output

    monkeypatch.setattr(bucket_programs, "CpuProgram", Other)
    with pytest.raises(SystemExit, match="gives other logits than that of any size"):
        bucket_programs.measure(Bundle.open(tiny_bundle), 1, 1, 20)
