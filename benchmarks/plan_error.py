"""How far `optimize plan` is from `optimize bench` on this machine: decode steps by batch and context, and prompts.

    python benchmarks/plan_error.py BUNDLE ... [--rounds N] [--json FILE]

In each round every bundle's kernels are timed as `optimize plan --gpu cpu` does it, steps are predicted, and then bench
runs: a machine that slows down slows both. Kernels are timed at sizes of their own (plugins/cpu/compile/plan.py): of
the grid's, only a batch of 1 is among their rows, and none of its contexts or prompts. A cell's error is the median of
the predictions over the median of what was measured, less 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

from enginewright.optimizer.bench.measure import bench, machine_facts
from enginewright.optimizer.bench.options import WARM_UP, BenchOptions
from enginewright.optimizer.plan.engine_seconds import engine_seconds
from enginewright.optimizer.plan.planner import first_token_seconds
from enginewright.plugins.cpu.compile.plan import decode, measure
from enginewright.plugins.steps.planning import CountedSteps
from enginewright.runtime.bundle.reader import Bundle

BATCHES, CONTEXTS, PROMPTS = (1, 4, 16), (64, 512, 2048), (128, 384)
STEPS, BENCH_ROUNDS = 24, 3
"""So many that what a size begins with, in the caches that the one before has left, isn't its median."""
MEMORY = 3 << 30

Size = tuple[str, int, int]
"""decode, batch and context; or prompt, 1 and its tokens"""


@dataclass(frozen=True)
class Cell:
    """One size of one bundle: seconds in each round, and the median's error."""

    recipe: str
    what: str
    batch: int
    tokens: int
    predicted: list[float]
    measured: list[float]

    @property
    def error(self) -> float:
        """Gives the median's error."""
        return median(self.predicted) / median(self.measured) - 1


def predict(bundle: Bundle, threads: int) -> dict[Size, float]:
    """Seconds by size, from kernels that are timed now."""
    engine = partial(engine_seconds, bundle.program("cpu").cache_groups)
    model = measure(CountedSteps(bundle.program("cpu")), bundle.model.context_length, engine, threads)
    middle = 1 + WARM_UP + STEPS // 2
    decodes = {("decode", b, c): model.seconds(decode(b, c + middle)) for c in CONTEXTS for b in BATCHES}
    return decodes | {("prompt", 1, n): first_token_seconds(model, n, 0, n) for n in PROMPTS}


def run(bundle: Bundle, threads: int) -> dict[Size, float]:
    """The same as bench finds it. Raises what ``bench`` raises."""
    asked = BenchOptions("cpu", PROMPTS, BATCHES, CONTEXTS, STEPS, BENCH_ROUNDS, threads, MEMORY)
    found = bench(bundle, asked)
    times: dict[Size, float] = {("prompt", 1, p.tokens): p.ttft.median for p in found.prompts}
    for d in found.decodes:
        assert d.step is not None, d.omitted
        times["decode", d.batch, d.context] = d.step.median
    return times


def compare(bundles: Sequence[Bundle], rounds: int, threads: int = 0) -> tuple[list[Cell], float]:
    """All cells, and the median of the seconds that a prediction takes."""
    cells: dict[tuple[str, Size], Cell] = {}
    seconds = []
    for _ in range(rounds):
        for bundle in bundles:
            recipe, start = str(bundle.manifest.recipe.get("name")), time.perf_counter()
            predicted = predict(bundle, threads)
            seconds.append(time.perf_counter() - start)
            measured = run(bundle, threads)
            for size in predicted:
                cell = cells.setdefault((recipe, size), Cell(recipe, *size, [], []))
                cell.predicted.append(predicted[size])
                cell.measured.append(measured[size])
    return list(cells.values()), median(seconds)


def median_error(cells: Sequence[Cell], what: str) -> float:
    """Gives the median of the sizes of errors."""
    return median(abs(cell.error) for cell in cells if cell.what == what)


def table(cells: Sequence[Cell]) -> list[str]:
    """As docs/inside/notes-cpu.md has it."""
    lines = ["| recipe | step | predicted | measured | error |", "| --- | --- | ---: | ---: | ---: |"]
    for c in cells:
        many = f"{c.batch} request{'s' if c.batch > 1 else ''} at {c.tokens:,} tokens"
        what = many if c.what == "decode" else f"prompt of {c.tokens}"
        error = f"{c.error:+.1%}".replace("%", " %").replace("-", "−")
        times = f"{median(c.predicted) * 1e3:.2f} ms | {median(c.measured) * 1e3:.2f} ms"
        lines.append(f"| `{c.recipe}` | {what} | {times} | {error} |")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the table, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+", help="with the target cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args(arguments)
    bundles = [Bundle.open(path) for path in options.bundles]
    cells, seconds = compare(bundles, options.rounds, options.threads)
    print("\n".join(table(cells)))
    medians = {what: median_error(cells, what) for what in ("decode", "prompt")}
    for what, error in medians.items():
        print(f"{what}: {error:.1%} median error")
    if options.json:
        facts = {
            "model": bundles[0].model.name,
            "machine": machine_facts(),
            "threads": options.threads,
            "steps": STEPS,
            "bench_rounds": BENCH_ROUNDS,
            "rounds": options.rounds,
            "seconds_of_a_prediction": round(seconds, 1),
            "median_error": {what: round(error, 4) for what, error in medians.items()},
            "cells": [asdict(c) | {"error": round(c.error, 4)} for c in cells],
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
