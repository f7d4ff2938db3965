"""Compares Enginewright with other engines on this machine: the same weights and prompts, interleaved.

    python benchmarks/bench_peers.py [--engines enginewright llama.cpp] [--models smollm2] [--formats int8] [--quick]

Peers are installed into build/bench/peers, an environment of their own; one that can't be is left out, and the
result says why. Two models: SmolLM2-135M-Instruct, and a Llama of 1.04 billion random weights, so that no cache
flatters anyone. Each run is a process of its own; figures are medians over the rounds, and what counts is the ratio in
one round, ours over the best peer of the same bits a weight, at a KL divergence from float32 that is no worse.
benchmarks/notes/benchmark.md has more.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from peers import docs
from peers.engines import CAPS, ENGINES, FORMATS, OURS
from peers.goals import read_reasons
from peers.install import last_error
from peers.loading import BUILD, REPOSITORY
from peers.machine import commit, machine
from peers.models import MODELS
from peers.prepare import Asked, Contender, prepare
from peers.processes import WorkerError
from peers.rounds import Measured, measure, plan, roofline
from peers.summary import judged, summarize
from peers.tables import whole
from peers.workload import Report, Task, Workload

COMPARED: tuple[Task, ...] = ("speed", "long", "start", "logits")
TAKEN: tuple[Task, ...] = (*COMPARED, "far")
"""Tasks that can be requested. A prompt of 16,384 tokens takes minutes, so "far" runs only if it is requested."""

QUICK: tuple[Task, ...] = ("speed", "start")
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    compared = [name for name, model in MODELS.items() if model.by_default]
    options.add_argument("--models", nargs="+", choices=MODELS, default=compared)
    options.add_argument("--formats", nargs="+", choices=FORMATS, default=[], help="those of each model if left out")
    options.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    options.add_argument("--tasks", nargs="+", choices=TAKEN, default=list(COMPARED), help="what is measured")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument(
        "--quick", action="store_true", help="one round of fewer steps, short prompts and starts alone"
    )
    options.add_argument("--prefix", type=shlex.split, default=[], help="put before every run, such as 'numactl -N 0'")
    options.add_argument("--json", type=Path, default=BUILD / "peers.json", help="where the result goes")
    options.add_argument("--prepare", action="store_true", help="install, convert and export, but measure nothing")
    options.add_argument(
        "--keep", action="store_true", help="take our bundles as they are, though the code has changed"
    )
    options.add_argument(
        "--isa", choices=CAPS, help="the instruction set that engines are limited to, as far as they can be"
    )
    options.add_argument("--kv-cache", help="what our bundles store keys and values in, instead of what recipes say")
    options.add_argument("--from-json", type=Path, help="measure nothing: take this result, with today's reasons")
    options.add_argument(
        "--update-docs", action="store_true", help="put the result into benchmarks/notes/benchmark.md and the README"
    )
    return options


def main(arguments: list[str] | None = None) -> int:
    """Prepares, measures, writes the result, prints it."""
    options = parser().parse_args(arguments)
    if options.from_json:
        result = json.loads(options.from_json.read_text(encoding="utf-8"))
        result["goals"] = judged(result["models"], read_reasons())
        return finish(result, options.from_json, options.update_docs)
    start = time.monotonic()
    tasks: tuple[Task, ...] = QUICK if options.quick else tuple(options.tasks)
    work = Workload(threads=options.threads, isa=options.isa, steps=12 if options.quick else Workload.steps)
    rounds = 1 if options.quick else options.rounds
    selection = Asked(
        options.models,
        options.formats,
        options.engines,
        tuple(options.prefix),
        options.keep,
        options.kv_cache,
        isa=options.isa,
    )
    try:
        contenders, missing = prepare(selection, tell)
    except subprocess.CalledProcessError as e:
        tell(f"our own part can't be made ready: {last_error(e.stderr)}")
        return 1
    tell(f"prepared in {time.monotonic() - start:.0f} s")
    if options.prepare:
        for one in missing:
            tell(f"missing: {one.engine} {one.model} {one.format}: {one.reason}")
        return 0
    measured: dict[Contender, Measured] = {}
    roofs: dict[tuple[str, str], list[Report]] = {}
    start = time.monotonic()
    status = 0
    try:
        jobs = plan(contenders, rounds, tasks)
        measure(jobs, work, measured, missing, before=lambda: roofs_of(contenders, work, roofs))
    except KeyboardInterrupt:
        tell("interrupted: the result has what was measured so far")
        status = INTERRUPTED
    result = {
        "measured": {
            "date": date.today().isoformat(),
            "commit": commit(),
            "command": f"benchmarks/bench_peers.py {shlex.join(told(options))}".strip(),
            "rounds": rounds,
            "seconds": round(time.monotonic() - start),
            "whole": status == 0,
        },
        "machine": machine(),
        "workload": asdict(work),
        "missing": [asdict(one) for one in missing],
        **summarize(list(measured.values()), roofs, read_reasons()),
    }
    return finish(result, options.json, options.update_docs and status == 0) or status


def roofs_of(contenders: list[Contender], work: Workload, roofs: dict[tuple[str, str], list[Report]]) -> None:
    """Measures what the machine could do with each of our bundles, before a round."""
    for contender in contenders:
        if contender.engine == OURS:
            try:
                report = roofline(contender, work)
            except WorkerError as e:
                tell(f"limits of {contender.model} {contender.format}: {e}")
                continue
            roofs.setdefault((contender.model, contender.format), []).append(report)
            tell(f"limits of {contender.model} {contender.format}: {dict(report.figures)}")


def told(options: argparse.Namespace) -> list[str]:
    """The options of the command line that affect the figures, if they differ from the defaults."""
    defaults = parser().parse_args([])
    changed: list[str] = []
    for name in ("models", "formats", "engines", "tasks", "rounds", "threads", "isa", "kv_cache"):
        value = getattr(options, name)
        if value != getattr(defaults, name):
            changed += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return [*changed, "--quick"] if options.quick else changed


def finish(result: dict[str, Any], path: Path, update: bool) -> int:
    """Writes and prints the result, and puts it into the documents if asked to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
    print("\n".join(whole(result)))
    tell(f"the result is in {path}")
    if update:
        resolved = path.resolve()
        if not resolved.is_relative_to(REPOSITORY):
            tell(f"{path} isn't in the repository: documents can't point to it")
            return 1
        for changed in docs.update(result, str(resolved.relative_to(REPOSITORY))):
            tell(f"changed {changed.relative_to(REPOSITORY)}")
    return 0


def tell(text: str) -> None:
    """Tells who watches."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
