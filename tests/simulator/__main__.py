"""Runs seeds of the simulator, or one again.

    python -m tests.simulator --seeds 2000                   # those of this commit
    python -m tests.simulator --seeds 1000 --from 5000 --json FILE
    python -m tests.simulator --replay 5017                  # a seed again, or a file of tests/simulator/recorded
    python -m tests.simulator --replay 5017 --minimise --record lost_copy

``--minimise`` looks for the smallest scenario that fails in the same way, and prints it. ``--record NAME`` keeps it in
tests/simulator/recorded, where ``make test`` runs it from then on. Ends with 1 if a seed failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from .minimise import minimise
from .scenario import Scenario, scenario
from .seeds import Report, first_seed, record, run_seeds
from .world import run

_EVERY = 500
"""Seeds between two lines of progress."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line that the module describes."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--from", dest="first", type=int, help="the first; else the commit's hash says it")
    parser.add_argument("--replay", metavar="SEED|FILE", help="run one again")
    parser.add_argument("--minimise", action="store_true", help="make a scenario that fails smaller")
    parser.add_argument("--record", metavar="NAME", help="keep it in tests/simulator/recorded")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        return _replay(options)
    first = first_seed() if options.first is None else options.first
    report = run_seeds(range(first, first + options.seeds), lambda report: _show(report, options))
    result = {"from": first} | report.to_json()
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{report.seeds} seeds from {first} on, {report.counts['steps']} steps, {report.seconds:.1f} s")
    for seed, message in report.failures.items():
        print(f"seed {seed}: {message}")
    if report.failures:
        print("To look at one: python -m tests.simulator --replay SEED --minimise")
    return 1 if report.failures else 0


def _show(report: Report, options: argparse.Namespace) -> None:
    if not options.quiet and report.seeds % _EVERY == 0:
        print(f"{report.seeds} of {options.seeds}, {len(report.failures)} failed", file=sys.stderr, flush=True)


def _replay(options: argparse.Namespace) -> int:
    seed = int(options.replay) if options.replay.isdigit() else None
    if seed is not None:
        one = scenario(seed)
    else:
        one = Scenario.from_json(json.loads(Path(options.replay).read_text(encoding="utf-8"))["scenario"])
    failures = run(one).failures
    if failures and options.minimise:
        one = minimise(one)
        failures = run(one).failures
    if options.record is not None:
        message = failures[0] if failures else ""
        print(record(options.record, seed, message, one))
    print(one)
    for message in failures or ["nothing fails"]:
        print(message)
    return 1 if failures else 0


if __name__ == "__main__":
    logging.getLogger("enginewright").setLevel(logging.CRITICAL)  # helpers that a scenario has raise are logged
    sys.exit(main())
