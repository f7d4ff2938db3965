"""Runs many seeds, and says what came of them."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .scenario import Scenario, scenario
from .world import run

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).parent / "recorded"
"""Scenarios that failed once, as JSON: each was made smaller, and its file says what was repaired."""
_WITHOUT_GIT = 20261128_000000


def commit() -> str | None:
    """The commit of this tree; None outside of a repository."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def first_seed() -> int:
    """The first of the seeds that belong to this commit: its tests can be repeated, and the next one has others."""
    name = commit()
    return _WITHOUT_GIT if name is None else int(name[:12], 16)


@dataclass
class Report:
    """The results of some seeds.

    Attributes:
        seeds: number of seeds that ran.
        seconds: processor time.
        failures: seed -> its first failure.
        counts: see ``Outcome``.
    """

    seeds: int = 0
    seconds: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        """The JSON for a benchmark's result."""
        return {
            "commit": commit(),
            "seeds": self.seeds,
            "steps": self.counts["steps"],
            "seconds": round(self.seconds, 1),
            "failures": {str(seed): message for seed, message in self.failures.items()},
            "counts": dict(sorted(self.counts.items())),
        }


def run_seeds(seeds: Iterable[int], after: Callable[[Report], None] = lambda report: None) -> Report:
    """Runs seeds; ``after`` is called with the report so far after each."""
    report = Report()
    begin = time.process_time()
    for seed in seeds:
        outcome = run(scenario(seed))
        report.seeds += 1
        report.seconds = time.process_time() - begin
        report.counts.update(outcome.counts)
        if outcome.failures:
            report.failures[seed] = outcome.failures[0]
        after(report)
    return report


def recorded() -> dict[str, Scenario]:
    """The scenarios that are kept, by their names."""
    return {
        path.stem: Scenario.from_json(json.loads(path.read_text(encoding="utf-8"))["scenario"])
        for path in sorted(RECORDED.glob("*.json"))
    }


def record(name: str, seed: int | None, message: str, small: Scenario) -> Path:
    """Keeps a scenario for good."""
    path = RECORDED / f"{name}.json"
    data = {"seed": seed, "failure": message, "scenario": small.to_json()}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return path
