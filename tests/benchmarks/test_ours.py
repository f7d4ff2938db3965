from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "ours.py"


def test_a_run_gives_every_speed(tiny_bundle: Path, tmp_path: Path) -> None:
    sizes = {"prompt": 40, "short_prompt": 8, "steps": 4, "batch": 3, "threads": 1, "vocabulary": 259}
    command = [sys.executable, str(SCRIPT), str(tiny_bundle), json.dumps(sizes)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    speeds = json.loads(done.stdout)
    assert all(speeds[name] > 0 for name in ("prefill", "decode_1", "decode_batch"))
    assert "threads 1" in speeds["engine"]
