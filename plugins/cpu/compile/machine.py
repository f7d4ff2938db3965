"""Measures the limits of this machine: its memory bandwidth, and its multiply-adds per second."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from enginewright.runtime.shared.errors import CapacityError
from enginewright.runtime.shared.step_costs import StepCost

from ..extension import cpu_extension

_CHUNK = 1 << 20
"""The bytes that a thread reads at a time. A working set smaller than one for each thread would leave threads idle."""

MOST_BYTES = 512 << 20
"""The bytes that are read to measure the bandwidth, more than any cache holds."""


@dataclass(frozen=True)
class Machine:
    """The processor's limits, to which steps are compared.

    Attributes:
        isa, threads: the instruction set and the number of threads of the kernels.
        bandwidth: bytes per second that all threads read together. It is measured on as many bytes as a decode step
            reads, so that processor caches hold the same share.
        peaks: multiply-adds per second by the type of the factors (f32, bf16, i8), with operands in registers.
    """

    isa: str
    threads: int
    bandwidth: float
    peaks: dict[str, float]

    def at_best(self, other: Machine) -> Machine:
        """Returns the higher limits of two measurements of one machine, since other load can only lower them."""
        peaks = {kind: max(peak, other.peaks[kind]) for kind, peak in self.peaks.items()}
        return Machine(self.isa, self.threads, max(self.bandwidth, other.bandwidth), peaks)


def measure_machine(isa: str, threads: int, types: Iterable[str], working_set: int) -> Machine:
    """Measures the limits of this machine, in some tenths of a second.

    Args:
        isa, threads: the instruction set and the number of threads of the kernels; at least one thread.
        types: the types of factors whose peaks are measured.
        working_set: the bytes that a step reads.

    Raises:
        CapacityError: there is too little memory.
    """
    nbytes = min(max(working_set, threads * _CHUNK), MOST_BYTES)
    try:
        bandwidth = cpu_extension.measure_bandwidth(nbytes, threads) * 1e9
    except MemoryError as e:
        raise CapacityError(f"no {nbytes:,} bytes of memory to measure the bandwidth with") from e
    peaks = {kind: cpu_extension.measure_peak(kind, threads, isa) * 1e9 for kind in sorted(types)}
    return Machine(isa, threads, bandwidth, peaks)


def limit_seconds(cost: StepCost, machine: Machine) -> float:
    """Returns the least time of a step: that of its memory transfers or of its multiply-adds, whichever is longer."""
    return max(cost.memory / machine.bandwidth, multiply_seconds(cost, machine))


def multiply_seconds(cost: StepCost, machine: Machine) -> float:
    """Returns the least time of a step's multiply-adds, in seconds."""
    return sum(count / machine.peaks[kind] for kind, count in cost.products.items() if kind in machine.peaks)
