"""What is timed of a program with some choices: a few steps that differ in what they wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from enginewright.optimizer.report.step_runner import StepRunner
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.shared.step_costs import StepSizes

_SHORT, _LONG, _BATCH, _PROMPT = 128, 1024, 8, 128
_SECONDS = 0.02
"""Of one measurement of a case: short steps are repeated."""


@dataclass(frozen=True)
class Case:
    """A step of some sizes."""

    name: str
    sizes: StepSizes


def cases_of(context: int) -> tuple[Case, ...]:
    """Decode steps of one request and of some, one far into a text, and a prompt; as long as the context allows."""
    short, long, prompt = (min(n, context) for n in (_SHORT, _LONG, _PROMPT))
    found = [
        Case(f"decode, 1 request at {short}", StepSizes((1,), (short,))),
        Case(f"decode, {_BATCH} requests at {short}", StepSizes((1,) * _BATCH, (short,) * _BATCH)),
        Case(f"prompt of {prompt}", StepSizes((prompt,), (prompt,))),
    ]
    if long > short:
        found.append(Case(f"decode, 1 request at {long}", StepSizes((1,), (long,))))
    return tuple(found)


class Timed(Protocol):
    """What is compared."""

    def time(self, case: int) -> float:
        """Seconds of a step of a case."""


def repeats_of(run: Callable[[], object], seconds: float = _SECONDS) -> int:
    """How often a step is run to take so long."""
    run()  # brings the weights into memory, and finds places for what is computed
    start = time.perf_counter()
    run()
    return max(1, round(seconds / max(time.perf_counter() - start, 1e-6)))


class Contender:
    """A program with some choices, ready to run.

    Args:
        bundle: opened, with a ready target cpu.
        cases: what will be run.
        threads: 0 takes one for each core.
        choices: see ``CpuProgram``.
    """

    def __init__(self, bundle: Bundle, cases: Sequence[Case], threads: int, choices: Mapping[str, int]) -> None:
        self.threads, self.choices = threads, dict(choices)
        self._runner = StepRunner(bundle, [case.sizes for case in cases], threads=threads, tuning=choices)
        self._runner.fill_caches()
        self._steps: list[StepInput] = [self._runner.step(case.sizes) for case in cases]
        self.repeats = [repeats_of(partial(self._runner.program.run, step)) for step in self._steps]

    @property
    def isa(self) -> str:
        return self._runner.program.isa

    @property
    def real_threads(self) -> int:
        return self._runner.program.threads

    def time(self, case: int) -> float:
        """Seconds of a step of a case: the mean of some."""
        step, repeats, run = self._steps[case], self.repeats[case], self._runner.program.run
        start = time.perf_counter()
        for _ in range(repeats):
            run(step)
        return (time.perf_counter() - start) / repeats
