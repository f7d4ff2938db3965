"""The trial of other sparsity, small: what patterns keep, and a model and products that have figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from enginewright.passes.quantization.gptq import Hessian
from enginewright.passes.sparsity.sparsegpt import factorize_by_fours, sparsegpt

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "sparsity_patterns.py"
NEEDED = {"avx512_vnni", "avx512_vbmi2"}


@pytest.fixture
def patterns(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sparsity_patterns

    module: ModuleType = sparsity_patterns
    return module


@pytest.mark.parametrize("rows", [64, 72])
def test_patterns_keep_what_they_say(patterns: ModuleType, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(rows, 128, generator=generator), torch.randn(400, 128, generator=generator)
    hessian = Hessian(128)
    hessian.add(x * torch.rand(128, generator=generator))
    factor = factorize_by_fours(hessian.sum)
    pruned = {name: patterns.pruned(weight, factor, pattern) for name, pattern in patterns.PATTERNS.items()}
    assert torch.equal(pruned["2:4"], sparsegpt(weight, factor))
    for name, pattern in patterns.PATTERNS.items():
        share = float((pruned[name] != 0).float().mean())
        whole = 4 if name.startswith("32x32") else 128  # groups in a row are kept or not
        assert share == pytest.approx(max(1, round(whole * pattern.density)) / whole, abs=0.01), name
    for name in ("32x4-50", "32x32-50"):
        outputs, inputs = patterns.PATTERNS[name].block
        for panel in (pruned[name] != 0).split(outputs):
            blocks = panel.unflatten(1, (-1, inputs)).sum((0, 2))
            assert set(blocks.tolist()) <= {0, len(panel) * inputs}, name
    errors = {n: float((x @ (pruned[n] - weight).t()).norm()) for n in ("none-50", "2:4", "32x4-50", "32x32-50")}
    assert list(errors) == sorted(errors, key=lambda n: errors[n])  # the freer the choice, the smaller


def test_a_model_has_figures(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    some = ["--patterns", "none-50", "32x4-50", "--formats", "int8", "--tokens", "512"]
    training = ["--steps", "2", "--batch-tokens", "256", "--sampled-tokens", "1024"]
    command = [sys.executable, str(SCRIPT), "--model-only", "--model", str(tiny_folder), *some, *training]
    done = subprocess.run([*command, "--output", str(out)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    dense, some_go, blocks_go = json.loads(out.read_text())["quality"]
    assert dense["kl"] < some_go["kl"] < blocks_go["kl"]
    assert blocks_go["steps"] == 2 and blocks_go["recovered_kl"] < blocks_go["kl"]
    assert "KL after 2 steps" in done.stdout


def test_products_are_those_of_dense_weights(tmp_path: Path) -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file() or not set(cpuinfo.read_text().split()) >= NEEDED:
        pytest.skip(f"the loops need {' and '.join(sorted(NEEDED))}")
    out = tmp_path / "out.json"
    sizes = ["--rows", "1", "6", "20", "--rounds", "1", "--threads", "1", "--size", "128", "--weight-bytes", "100000"]
    command = [sys.executable, str(SCRIPT), "--kernels-only", *sizes, "--output", str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # the program compares them bit for bit
    speeds = json.loads(out.read_text())["speed"]
    assert {(row["pattern"], row["rows"]) for row in speeds} >= {("none-50", 1), ("32x4-70", 6), ("32x32-90", 20)}
    assert all(row["speed"] > 0 and 0 < row["bytes"] < 1 for row in speeds)
