"""Measures the machine's memory bandwidth and peak arithmetic between rounds, and computes the least time of a step."""

from __future__ import annotations

from enginewright.plugins.cpu.compile.machine import Machine, limit_seconds
from enginewright.plugins.cpu.extension import cpu_extension
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, step_costs

from .result import Limits, Spread

_LEAST, _MOST = 1 << 20, 1 << 30


class LimitMeter:
    """Measures the machine's memory bandwidth and peak multiply-adds. Each measurement takes some tenths of a second.

    Args:
        program: the program. The size of its weights is that of the memory to read, and its kinds of products are those
            whose peaks are measured.
        isa: instruction set of the kernels.
        threads: threads of the kernels.
    """

    def __init__(self, program: LoweredProgram, isa: str, threads: int) -> None:
        self._program = program
        self._isa, self._threads = isa, threads
        whole = self.cost(StepSizes((1,), (1,)))
        self.working_set = min(max(whole.weights, _LEAST), _MOST)
        self._bandwidths: list[float] = []
        self._peaks: dict[str, list[float]] = {kind: [] for kind in sorted(whole.products)}

    def measure(self) -> None:
        """Measures the bandwidth and the peaks once more. Raises MemoryError if the working set doesn't fit."""
        self._bandwidths.append(cpu_extension.measure_bandwidth(self.working_set, self._threads) * 1e9)
        for kind, samples in self._peaks.items():
            samples.append(cpu_extension.measure_peak(kind, self._threads, self._isa) * 1e9)

    def cost(self, sizes: StepSizes) -> StepCost:
        """Sums the costs of all steps of the program."""
        return sum(step_costs(self._program, sizes), StepCost())

    def seconds(self, sizes: StepSizes) -> float:
        """Returns the least seconds for a step of these sizes: the sum of each op's own limit."""
        machine = self.machine()
        return sum(limit_seconds(cost, machine) for cost in step_costs(self._program, sizes))

    def limit_of(self, cost: StepCost) -> float:
        """Returns the minimum seconds for work of this cost by the machine's limits."""
        return limit_seconds(cost, self.machine())

    def machine(self) -> Machine:
        """Returns the machine with the medians of all measurements so far."""
        limits = self.limits()
        peaks = {kind: peak.median for kind, peak in limits.peaks.items()}
        return Machine(self._isa, self._threads, limits.bandwidth.median, peaks)

    def limits(self) -> Limits:
        """Returns the spread of all measurements; ``measure`` must have run at least once."""
        peaks = {kind: Spread.from_values(samples) for kind, samples in self._peaks.items()}
        return Limits(self.working_set, Spread.from_values(self._bandwidths), peaks)


def share_of(limit: float | None, seconds: float) -> float | None:
    """Returns the reached share of the machine's speed, ``limit / seconds``: 0.5 if work took twice its least time.

    Args:
        limit: the least seconds in which the machine can do the work; None or 0 if there is no limit.
        seconds: the measured seconds.

    Returns None without a limit, and for 0 seconds.
    """
    return limit / seconds if limit and seconds > 0 else None
