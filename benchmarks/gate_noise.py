"""The speed checks of `optimize verify --against`: equal bundles on a busy machine, slower builds on an idle one.

    python benchmarks/gate_noise.py [--only slower|equal] [--runs N] [--busy N] [--json FILE]

A gate must not fail a bundle that is compared with itself, however busy the machine is, and must find a slower build on
an idle machine. Each run is the command, in a process of its own, with the default budget. Random Llamas of 19 million
weights are exported; the slower builds have more layers, a wider MLP, or wider weights, and take at least a sixth
longer than the limit with its margin allows. The other checks are switched off: the models differ on purpose.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from enginewright.optimizer.bench.measure import machine_facts
from enginewright.optimizer.export import export

BASE = {"num_hidden_layers": 6, "intermediate_size": 1536}
SLOWER: dict[str, dict[str, int]] = {
    "2 layers more": {"num_hidden_layers": 8},
    "3 layers more": {"num_hidden_layers": 9},
    "twice the layers": {"num_hidden_layers": 12},
    "an MLP of twice the width": {"intermediate_size": 3072},
}
FORMATS = ("f32", "bf16", "int8", "int4")
WIDER = (("int4", "f32"), ("int4", "bf16"), ("int8", "f32"), ("int8", "bf16"))
"""Recipes of the build before, and of the slower one."""

BUDGET = """\
tokens_changed = inf
kl_mean = inf
kl_max = inf
layers = false
size_ratio = inf
memory_ratio = inf
generation = false
kv_cache = false
"""
OPTIMIZE = Path(sys.executable).with_name("optimize")
OUTCOMES = {0: "passed", 16: "failed", 18: "inconclusive"}


def build(folder: Path, name: str, recipe: str, changes: dict[str, int]) -> Path:
    """Exports a random Llama; returns the bundle."""
    bundle = folder / f"{name}.{recipe}.bundle"
    if not bundle.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=512, num_attention_heads=8, num_key_value_heads=2, vocab_size=2048, **(BASE | changes)
        )
        export(LlamaForCausalLM(config).eval(), bundle, recipe=recipe)
    return bundle


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Runs processes that do nothing but compute."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def gate(new: Path, older: Path, budget: Path) -> dict[str, Any]:
    """Runs the command; returns its outcome and its checks of speed."""
    start = time.perf_counter()
    command = [OPTIMIZE, "verify", str(new), "--against", str(older)]
    done = subprocess.run([*command, "--budget", str(budget), "--json", "--quiet"], capture_output=True, text=True)
    if done.returncode not in OUTCOMES:
        sys.exit(f"verify ended with {done.returncode}: {done.stderr}")
    checks = json.loads(done.stdout)["against"]["checks"]
    timed = {one["name"]: {k: one[k] for k in ("outcome", "measured", "interval")} for one in checks if one["interval"]}
    return {
        "outcome": OUTCOMES[done.returncode],
        "seconds": round(time.perf_counter() - start, 1),
        "checks": timed,
    }


def slower_builds(folder: Path, budget: Path) -> dict[str, dict[str, Any]]:
    """Runs the gate once on each slower build; returns what it says of each."""
    pairs = {
        f"{what}, {recipe}": (
            build(folder, what.replace(" ", "-"), recipe, changes),
            build(folder, "base", recipe, {}),
        )
        for recipe in FORMATS
        for what, changes in SLOWER.items()
    }
    pairs |= {
        f"{now} in place of {was}": (build(folder, "base", now, {}), build(folder, "base", was, {}))
        for was, now in WIDER
    }
    outcomes = {}
    for what, (new, older) in pairs.items():
        outcomes[what] = gate(new, older, budget)
        print(f"{what}: {outcomes[what]['outcome']}", outcomes[what]["checks"], flush=True)
    return outcomes


def equal_bundles(folder: Path, budget: Path, runs: int, processes: int) -> list[dict[str, Any]]:
    """Runs the gate on two bundles that differ in one embedding row, next to busy processes; returns results.

    Bundles whose files are equal are not timed.
    """
    bundle, outcomes = build(folder, "base", "int8", {}), []
    other = build(folder, "same", "int8", {"pad_token_id": 3})
    with busy(processes):
        for _ in range(runs):
            outcomes.append(gate(other, bundle, budget))
            print(f"equal, {processes} busy processes: {outcomes[-1]['outcome']}", outcomes[-1]["checks"], flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("slower", "equal"), help="one of the two parts; by default both")
    parser.add_argument("--runs", type=int, default=40, help="runs on equal bundles (40)")
    parser.add_argument("--busy", type=int, default=4, help="processes that compute next to them (4)")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        budget = folder / "budget.toml"
        budget.write_text(BUDGET)
        planted = {} if options.only == "equal" else slower_builds(folder, budget)
        equal = [] if options.only == "slower" else equal_bundles(folder, budget, options.runs, options.busy)
    counts = {
        "slower builds, idle": Counter(one["outcome"] for one in planted.values()),
        f"equal bundles, {options.busy} busy processes": Counter(one["outcome"] for one in equal),
    }
    for what, count in counts.items():
        print(f"{what}: {dict(count)}")
    if options.json:
        result = {"machine": machine_facts(), "counts": counts, "planted": planted, "equal": equal}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
