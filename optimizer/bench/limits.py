"""The machine's peak bandwidth and arithmetic, measured between rounds, and the least time that they allow a step."""

from __future__ import annotations

from collections.abc import Iterable

from enginewright.plugins.cpu.compile.machine import Machine, limit_seconds
from enginewright.plugins.cpu.extension import cpu_extension
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, step_costs

from .result import Limits, Spread

_LEAST, _MOST = 1 << 20, 1 << 30


class LimitMeter:
    """Measures anew each time it is asked, for some tenths of a second.

    Args:
        program: whose weights are the working set, and whose products the peaks.
        isa, threads: of the kernels.
    """

    def __init__(self, program: LoweredProgram, isa: str, threads: int) -> None:
        self._program = program
        self._isa, self._threads = isa, threads
        whole = self.cost(StepSizes((1,), (1,)))
        self.working_set = min(max(whole.weights, _LEAST), _MOST)
        self._bandwidths: list[float] = []
        self._peaks: dict[str, list[float]] = {kind: [] for kind in sorted(whole.products)}

    def measure(self) -> None:
        """Raises MemoryError."""
        self._bandwidths.append(cpu_extension.measure_bandwidth(self.working_set, self._threads) * 1e9)
        for kind, samples in self._peaks.items():
            samples.append(cpu_extension.measure_peak(kind, self._threads, self._isa) * 1e9)

    def cost(self, sizes: StepSizes) -> StepCost:
        """Sums the costs of all steps of the program."""
        return sum(step_costs(self._program, sizes), StepCost())

    def seconds(self, sizes: StepSizes) -> float:
        """The least time for a step of these sizes: each step of the program at its own limit."""
        return least_seconds(step_costs(self._program, sizes), self.machine())

    def limit_of(self, cost: StepCost) -> float:
        """The least time for steps of this cost together; 0 if they bring nothing from memory."""
        return limit_seconds(cost, self.machine())

    def machine(self) -> Machine:
        """Medians of what was measured so far."""
        limits = self.limits()
        peaks = {kind: peak.median for kind, peak in limits.peaks.items()}
        return Machine(self._isa, self._threads, limits.bandwidth.median, peaks)

    def limits(self) -> Limits:
        """Returns the spread of all measurements; ``measure`` must have run at least once."""
        peaks = {kind: Spread.from_values(samples) for kind, samples in self._peaks.items()}
        return Limits(self.working_set, Spread.from_values(self._bandwidths), peaks)


def least_seconds(costs: Iterable[StepCost], machine: Machine) -> float:
    """The least time for steps one after the other."""
    return sum(limit_seconds(cost, machine) for cost in costs)


def share_of(limit: float | None, seconds: float) -> float | None:
    """Says which share of the limit was reached."""
    return limit / seconds if limit and seconds > 0 else None
