"""Bytes that decode steps read, as the report predicts them and as the processor marks them.

    python benchmarks/step_bytes.py BUNDLE ...          # a table for benchmarks/notes/cpu.md
    python benchmarks/step_bytes.py --json BUNDLE ...   # the same for a program

Each bundle's weights are copied to memory of their own first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pages_read

from enginewright.plugins.cpu.compile.step_runner import StepRunner
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, step_costs, stored_bytes

SHAPES = {
    "1 request, context 128": StepSizes((1,), (128,)),
    "1 request, context 1000": StepSizes((1,), (1000,)),
    "8 requests, context 500": StepSizes((1,) * 8, (500,) * 8),
    "prompt of 256": StepSizes((256,), (256,)),
}


@dataclass(frozen=True)
class Counted:
    """Bytes of one step: as predicted, and of the pages that it accessed."""

    shape: str
    weights: int
    weights_read: int
    kv: int
    kv_read: int


REPEATS = 3
"""A system short of memory clears marks as it looks for pages to reclaim, and never makes one: the most is right."""


def count(bundle: Bundle, shapes: dict[str, StepSizes]) -> list[Counted]:
    """Runs each shape ``REPEATS`` times. Raises what opening and running a program raise."""
    program = bundle.program("cpu")
    arena = pages_read.Arena(sum(stored_bytes(use) + 64 for use in program.weights))
    weights = arena.copies({use.name: bundle.weight(use.name) for use in program.weights})
    runner = StepRunner(bundle, list(shapes.values()), threads=1, weights=weights)
    caches = runner.caches()
    for array in caches:
        pages_read.keep_small(array)
    runner.fill_caches()
    counts = []
    for name, sizes in shapes.items():
        step = runner.step(sizes)
        cost = sum(step_costs(program, sizes), StepCost())
        weights_read = kv_read = 0
        for _ in range(REPEATS):
            pages_read.clear([arena.array, *caches])
            runner.program.run(step)
            weights_read = max(weights_read, pages_read.accessed([arena.array]))
            kv_read = max(kv_read, pages_read.accessed(caches))
        counts.append(Counted(name, cost.weights, weights_read, cost.kv_read, kv_read))
    return counts


def main(arguments: Sequence[str]) -> None:
    """Prints the table of all bundles."""
    bundles = [Bundle.open(Path(path)) for path in arguments if path != "--json"]
    counts = {str(b.manifest.recipe.get("name")): count(b, SHAPES) for b in bundles}
    if "--json" in arguments:
        print(json.dumps({recipe: [asdict(c) for c in rows] for recipe, rows in counts.items()}))
        return
    print("| recipe | step | weights predicted | read | ratio | KV cache predicted | read | ratio |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for recipe, rows in counts.items():
        for c in rows:
            print(
                f"| `{recipe}` | {c.shape} | {c.weights:,} | {c.weights_read:,} | {c.weights / c.weights_read:.4f} | "
                f"{c.kv:,} | {c.kv_read:,} | {c.kv / c.kv_read:.4f} |"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
