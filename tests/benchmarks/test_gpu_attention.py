"""benchmarks/gpu_attention.py can only be run on a GPU; here it says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_attention.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[triton]'")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "torch sees no GPU" in done.stderr
