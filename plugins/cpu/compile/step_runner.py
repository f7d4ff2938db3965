"""Runs single steps of a bundle's program at any sizes, for measurements. It doesn't import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.open import make_executor
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.step_costs import StepSizes

from ...native.executable import CpuProgram
from ...steps.timed_steps import random_step
from ..serve.executor import CpuExecutor

_FILL = 0x3C
"""The value of each byte of made-up caches: 60 as int8, 1.5 as fp8, 0.01 as bf16 and f32. Values don't change a step's
time.
"""


class StepRunner:
    """A bundle's cpu program, with KV caches for the largest of some sizes.

    Args:
        bundle: a bundle with a ready target cpu.
        sizes: all sizes that will be run.
        threads: the number of threads; 0 means one for each core.
        weights: arrays by name that replace the bundle's weights.
        lowered: a program that replaces the bundle's.
        tuning, isa: see ``CpuProgram``.

    Raises:
        BundleError, CapacityError: as for a program that is opened to be served.
    """

    def __init__(
        self,
        bundle: Bundle,
        sizes: Sequence[StepSizes],
        *,
        threads: int = 0,
        weights: Mapping[str, npt.NDArray[np.generic]] | None = None,
        lowered: LoweredProgram | None = None,
        tuning: Mapping[str, int] | None = None,
        isa: str | None = None,
    ) -> None:
        self.lowered = bundle.program("cpu") if lowered is None else lowered
        self.vocabulary = bundle.model.vocab_size
        arrays = weights or {use.name: bundle.weight(use.name) for use in self.lowered.weights}
        blocks = _blocks(self.lowered, sizes)
        self.program = CpuProgram(self.lowered, arrays, blocks=blocks, threads=threads, tuning=tuning, isa=isa)

    def caches(self) -> list[npt.NDArray[np.uint8]]:
        """Returns the memory of keys and of values, layer by layer."""
        return cache_memory(self.program)

    def fill_caches(self) -> None:
        """Fills the caches with made-up keys and values; see ``fill_caches``."""
        fill_caches(self.program)

    def step(self, sizes: StepSizes) -> StepInput:
        """Returns a step of these sizes with random tokens."""
        return random_step(self.lowered.cache_groups, self.vocabulary, sizes, ports=self.lowered.ports)


def open_ranks(
    bundle: Bundle, sizes: Sequence[StepSizes], *, threads: int = 0, partition: Partition = Partition()
) -> CpuExecutor:
    """Opens an executor of the bundle's cpu program, on several ranks if ``partition`` has several. The caller closes
    it.

    Its KV caches have room for the largest of ``sizes``, and are filled with made-up values.
    """
    blocks, placement = _blocks(bundle.program("cpu"), sizes), Placement(threads=threads, partition=partition)
    executor = make_executor(bundle, "cpu", blocks, bundle.model.context_length, placement)
    assert isinstance(executor, CpuExecutor)
    fill_caches(executor.program)
    return executor


def _blocks(lowered: LoweredProgram, sizes: Sequence[StepSizes]) -> dict[str, int]:
    return {
        group.name: max(len(s.contexts) * -(-max(s.contexts) // group.block_size) for s in sizes)
        for group in lowered.cache_groups
    }


def cache_memory(program: CpuProgram) -> list[npt.NDArray[np.uint8]]:
    """Returns the memory of keys and of values, layer by layer."""
    groups = program.lowered.cache_groups
    return [a for group in groups for i in group.layers for a in program.cache_memory(group.name, i)]


def fill_caches(program: CpuProgram) -> None:
    """Fills the caches with made-up keys and values.

    Pages of memory that were never written are all the system's one page of zeros, which stays in the CPU's caches. So
    times with such pages would be too short.
    """
    for array in cache_memory(program):
        array.fill(_FILL)
