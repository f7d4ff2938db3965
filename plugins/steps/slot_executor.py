"""The common part of executors with slots as their blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.base import Deferred
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps, StepInput

from ..native.threads import available_threads
from .slot_steps import SlotSteps


class SlotExecutor:
    """An executor whose steps run on the thread that calls ``result``. Prefill and decode alternate.

    A subclass sets ``_steps`` after allocating its slots.

    Args:
        bundle: the opened bundle.
        target: the target's name.
        blocks: slots to allocate by cache group; all groups get the smallest number.
        groups: the cache groups, with slots as their blocks.
        threads: the number of threads of kernels on the CPU and of the sampler; 0 means one for each core.
    """

    _steps: SlotSteps

    def __init__(
        self, bundle: Bundle, target: str, blocks: Mapping[str, int], groups: Sequence[CacheGroup], threads: int
    ) -> None:
        self._bundle, self._target, self.blocks = bundle, target, dict(blocks)
        self.cache_groups: tuple[CacheGroup, ...] = tuple(groups)
        self._count = min(self.blocks[group.name] for group in self.cache_groups)
        self.caps = ExecutorCaps(ragged=False, max_requests=self._count, kept_slots=True)
        self._threads = threads or available_threads()

    def submit(self, step: StepInput) -> Deferred:
        self._bundle.check_unchanged()
        return Deferred(self._steps.run, step)

    def close(self) -> None:
        """Does nothing: nothing runs between steps, and memory goes with the object."""
