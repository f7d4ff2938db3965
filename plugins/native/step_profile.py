"""Adds up the time of a program's steps over any number of runs; free of torch."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.contracts import StepInput, StepOutput
from enginewright.runtime.shared.lowered_program import LoweredProgram, Step
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, step_costs

from .executable import CpuProgram


@dataclass(frozen=True)
class StepTotal:
    """Steps of the program that have their key in common.

    Attributes:
        key: the op, or the module path.
        calls: the number of kernel calls, over all runs.
        seconds: the time of these calls together, in seconds.
        cost: bytes and multiply-adds of these calls together; see ``step_costs``.
    """

    key: str
    calls: int
    seconds: float
    cost: StepCost


@dataclass
class _Runs:
    """All runs of one program at the same sizes."""

    lowered: LoweredProgram
    sizes: StepSizes
    runs: int = 0
    seconds: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # [steps]


class StepProfile:
    """Sums the seconds, bytes and multiply-adds of each step of a program. It isn't thread-safe.

    Without a profile, no clock is read.

    Attributes:
        runs: the number of runs added.
        seconds: duration of these runs for the caller: kernels, checks of the inputs, sampling, copies of logits.
    """

    def __init__(self) -> None:
        self.runs = 0
        self.seconds = 0.0
        self._runs: dict[tuple[int, StepSizes], _Runs] = {}

    def run(self, program: CpuProgram, step: StepInput) -> StepOutput:
        """Runs ``program.run(step)`` and adds its times. Raises its errors; a failed run isn't added."""
        start = time.perf_counter()
        output, seconds = program.profile(step)
        self.add(program.lowered, sizes_of(step), seconds, time.perf_counter() - start)
        return output

    def add(
        self, lowered: LoweredProgram, sizes: StepSizes, seconds: npt.NDArray[np.float64], whole: float | None = None
    ) -> None:
        """Adds one run: ``seconds`` [steps] of ``CpuProgram.profile``, and the duration ``whole`` of the run for the
        caller.
        """
        runs = self._runs.setdefault((id(lowered), sizes), _Runs(lowered, sizes))
        runs.seconds = seconds + (runs.seconds if runs.runs else 0.0)
        runs.runs += 1
        self.runs += 1
        self.seconds += float(seconds.sum()) if whole is None else whole

    @property
    def kernels(self) -> float:
        """Returns the seconds of all steps of the program; the rest of ``seconds`` is work around them."""
        return sum(float(r.seconds.sum()) for r in self._runs.values())

    def by_op(self) -> list[StepTotal]:
        """Returns the totals by op, the longest first."""
        return self.totals(lambda step: step.op)

    def totals(self, key: Callable[[Step], str]) -> list[StepTotal]:
        """Returns the totals of steps grouped by ``key``, the longest first."""
        calls: defaultdict[str, int] = defaultdict(int)
        seconds: defaultdict[str, float] = defaultdict(float)
        costs: defaultdict[str, StepCost] = defaultdict(StepCost)
        for runs in self._runs.values():
            steps = zip(runs.lowered.steps, runs.seconds, step_costs(runs.lowered, runs.sizes), strict=True)
            for step, took, cost in steps:
                name = key(step)
                calls[name] += runs.runs
                seconds[name] += float(took)
                costs[name] += cost.times(runs.runs)
        totals = [StepTotal(name, calls[name], seconds[name], costs[name]) for name in calls]
        return sorted(totals, key=lambda total: -total.seconds)


def sizes_of(step: StepInput) -> StepSizes:
    """Returns the sizes of a step's inputs."""
    lengths: Sequence[int] = step.counts.tolist()
    return StepSizes(tuple(lengths), tuple(step.kv_len.tolist()), len(step.rows))
