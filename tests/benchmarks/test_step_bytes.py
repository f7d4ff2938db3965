"""The bytes that a report predicts of a step are those that the kernels read, as the processor marks their pages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048, "head_dim": 64}
"""Large enough that a page (4 KiB) more or less at an edge isn't a percent."""

EXPERTS = SIZES | {"num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("family", "sizes", "recipe"),
    [("Llama", SIZES, "f32"), ("Llama", SIZES, "int8"), ("Llama", SIZES, "int4"), ("Mixtral", EXPERTS, "f32")],
)
def test_a_decode_step_reads_what_is_predicted(
    family: str, sizes: dict[str, int], recipe: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    counted = [sys.executable, "-c", "import pages_read; raise SystemExit(not pages_read.pages_are_counted())"]
    if subprocess.run(counted, cwd=BENCHMARKS).returncode:
        pytest.skip("this system does not tell which pages were accessed")
    chosen = load_recipe(recipe)
    lenient = chosen.model_copy(update={"budget": chosen.budget.model_copy(update={"max_kl": 10.0})})
    export(tiny_model(family, **sizes), tmp_path / "a.bundle", recipe=lenient)
    command = [sys.executable, str(BENCHMARKS / "step_bytes.py"), "--json", str(tmp_path / "a.bundle")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (rows,) = json.loads(done.stdout).values()
    decode = [row for row in rows if row["shape"].startswith("1 request")]
    assert len(decode) == 2
    for row in decode:
        assert row["weights"] == pytest.approx(row["weights_read"], rel=0.05), row
        assert row["kv"] == pytest.approx(row["kv_read"], rel=0.05), row
    # Several tokens choose other experts than they do on average: that isn't a byte more or less of keys and values.
    for row in rows:
        assert row["kv"] == pytest.approx(row["kv_read"], rel=0.05), row
