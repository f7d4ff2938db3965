"""What a bucket's own program gains on the cpu target over the program of any size, at the same sizes of steps.

    python benchmarks/bucket_programs.py BUNDLE [--threads 2] [--rounds 7] [--context 256] [--json FILE]

Both programs share caches, weights, threads and arena, and alternate; of each round the ratio of their times counts,
so that a machine that slows down slows both. A step of a bucket of tokens is one prompt that fills it, one of a batch
has as many requests with --context tokens in the cache. The buckets are the bundle's, or some usual sizes where it has
none. Their logits are compared as well, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from enginewright.optimizer.report.step_runner import StepRunner
from enginewright.passes.memory.specialize_program import specialize_program
from enginewright.plugins.cpu.executable import CpuProgram
from enginewright.runtime.bundle.buckets import Bucket, BucketPlan
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.static_shapes import pad
from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.shared.step_costs import StepSizes

USUAL = BucketPlan.of((128, 512), (1, 8, 32), 32)
LEAST_SECONDS = 0.02
"""Of the runs of a program in one round."""


@dataclass
class Row:
    """One bucket.

    Attributes:
        load_seconds: to make its program ready, from its file where the bundle has one.
        arena_bytes, arena_bytes_any: of its program, and of that of any size at its sizes.
        seconds: of a step in its program, in each round.
        ratios: how many times as long the program of any size took, in each round.
    """

    name: str
    load_seconds: float
    arena_bytes: int
    arena_bytes_any: int
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


def sizes_of(bucket: Bucket, context: int) -> StepSizes:
    """The step that fills a bucket, of requests with ``context`` tokens where it is of decodes."""
    if bucket.kind == "tokens":
        return StepSizes(lengths=(bucket.tokens,), contexts=(bucket.tokens,))
    return StepSizes(lengths=(1,) * bucket.tokens, contexts=(context,) * bucket.tokens)


def measure(bundle: Bundle, threads: int, rounds: int, context: int) -> list[Row]:
    """A row for each bucket; raises SystemExit if any bit differs."""
    plan = bundle.buckets.get("cpu", USUAL)
    longest = bundle.model.context_length
    buckets = [b for b in plan.buckets if b.kind == "batch" or b.tokens <= longest]
    sizes = {b.name: sizes_of(b, min(context, longest)) for b in buckets}
    runner = StepRunner(bundle, list(sizes.values()), threads=threads)
    runner.fill_caches()
    weights = {use.name: bundle.weight(use.name) for use in runner.lowered.weights}
    groups = [group.to_group() for group in runner.lowered.cache_groups]
    rows = []
    for bucket in buckets:
        lowered = specialize_program(runner.lowered, bucket.tokens, bucket.requests, bucket.rows)
        start = time.perf_counter()
        if "cpu" in bundle.buckets:
            lowered = bundle.bucket_program("cpu", bucket)
        own = CpuProgram(lowered, weights, share=runner.program)
        row = Row(
            bucket.name,
            time.perf_counter() - start,
            lowered.arena_bytes.constant,
            runner.lowered.arena_bytes.evaluate(bucket.tokens, bucket.requests, bucket.rows),
        )
        # Its tokens are all there, so no slot is needed for padding: requests and rows alone are filled up.
        step = pad(runner.step(sizes[bucket.name]), bucket, groups, {group.name: 0 for group in groups})
        compare(runner.program, own, step, bucket.name)
        runs = max(1, round(LEAST_SECONDS / timed(own, step, 1)))
        for turn in range(rounds):
            first, second = (runner.program, own) if turn % 2 else (own, runner.program)
            times = {id(program): timed(program, step, runs) for program in (first, second)}
            row.seconds.append(times[id(own)])
            row.ratios.append(times[id(runner.program)] / times[id(own)])
        rows.append(row)
    return rows


def timed(program: CpuProgram, step: StepInput, runs: int) -> float:
    """Seconds of a run."""
    start = time.perf_counter()
    for _ in range(runs):
        program.run(step)
    return (time.perf_counter() - start) / runs


def compare(any_size: CpuProgram, own: CpuProgram, step: StepInput, name: str) -> None:
    """Raises SystemExit unless both give the same bits."""
    asked = StepInput(**(vars(step) | {"return_logits": True}))
    expected, found = any_size.run(asked).logits, own.run(asked).logits
    assert expected is not None and found is not None
    if not np.array_equal(expected.view(np.int32), found.view(np.int32)):
        raise SystemExit(f"{name}: its program gives other logits than that of any size")


def lines(rows: list[Row]) -> list[str]:
    """The rows as a table."""
    found = [f"{'bucket':<14}{'load':>9}{'arena':>11}{'of any size':>13}{'step':>11}   any size / own (least to most)"]
    for row in rows:
        found.append(
            f"{row.name:<14}{row.load_seconds * 1e3:>6.0f} ms{row.arena_bytes / 1e6:>8.2f} MB"
            f"{row.arena_bytes_any / 1e6:>10.2f} MB{median(row.seconds) * 1e3:>8.2f} ms   "
            f"{median(row.ratios):.3f} ({min(row.ratios):.3f} to {max(row.ratios):.3f})"
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache of each request that decodes")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args(arguments)
    rows = measure(Bundle.open(options.bundle), options.threads, options.rounds, options.context)
    print("\n".join(lines(rows)))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
