"""Adds up the times of a program's steps over any number of runs. It doesn't import torch."""

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
    """The total of a group of a program's steps.

    Attributes:
        key: the op or the module path that they have in common.
        calls: the number of kernel calls, over all runs.
        seconds: the time of these calls together.
        cost: the bytes and multiply-adds of these calls together; see ``step_costs``.
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
    """Adds up the seconds, bytes and multiply-adds of each step of a program. It isn't thread-safe.

    A program without a profile reads no clock.

    Attributes:
        runs: the number of runs added.
        seconds: the duration of these runs for the caller: kernels, checks of the inputs, sampling, copies of logits.
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
        """Adds one run: ``seconds`` [steps] from ``CpuProgram.profile``, and ``whole``, the run's duration for the
        caller.
        """
        runs = self._runs.setdefault((id(lowered), sizes), _Runs(lowered, sizes))
        runs.seconds = seconds + (runs.seconds if runs.runs else 0.0)
        runs.runs += 1
        self.runs += 1
        self.seconds += float(seconds.sum()) if whole is None else whole

    @property
    def kernels(self) -> float:
        """The seconds of all steps of the program. The rest of ``seconds`` is work around them."""
        return sum(float(r.seconds.sum()) for r in self._runs.values())

    def by_op(self) -> list[StepTotal]:
        """Returns the totals by op, the longest first."""
        return self.totals(lambda step: step.op)

    def totals(self, key: Callable[[Step], str]) -> list[StepTotal]:
        """Returns the totals of groups of steps, the longest first. ``key`` returns the group of a step."""
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
    """Returns the sizes of a step: the tokens and the context of each request."""
    lengths: Sequence[int] = step.counts.tolist()
    return StepSizes(tuple(lengths), tuple(step.kv_len.tolist()), len(step.rows))
