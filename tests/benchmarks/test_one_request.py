"""Each thread's parts of a traced decode step add up to the step."""

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

TOOL = Path(__file__).resolve().parents[2] / "benchmarks" / "one_request.py"
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048, "head_dim": 64}


def test_parts_of_a_step_are_the_whole_step(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    chosen = load_recipe("int8")
    lenient = chosen.model_copy(update={"budget": chosen.budget.model_copy(update={"max_kl": 10.0})})
    export(tiny_model("Llama", **SIZES), tmp_path / "a.bundle", recipe=lenient)
    for threads, requests in ((1, 1), (2, 1), (3, 4)):
        check_parts(tmp_path, threads, requests)


def check_parts(tmp_path: Path, threads: int, requests: int) -> None:
    """Measures ``a.bundle``, and checks what is written."""
    command = [sys.executable, str(TOOL), str(tmp_path / "a.bundle"), "--json", str(tmp_path / "found.json")]
    command += ["--pairs", "6", "--traced", "4", "--threads", str(threads), "--requests", str(requests)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (figures,) = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert figures["ratio"] > 0 and figures["pairs"] == 6 and figures["requests"] == requests
    parts = figures["percent_of_step_by_thread"]
    assert len(parts) == figures["threads"] == threads
    for thread in parts:
        assert sum(thread.values()) == pytest.approx(100, abs=0.1), parts
        assert all(share >= 0 for share in thread.values())
    caller = parts[0]
    assert {"Python", "products", "sampling", "small ops"} <= set(caller)
    assert ("waits" in caller) is (threads > 1)
    assert all("Python" not in thread and "waits" in thread for thread in parts[1:])
