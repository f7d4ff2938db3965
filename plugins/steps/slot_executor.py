"""The common base of executors whose blocks are slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.base import Deferred
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps, StepInput
from enginewright.runtime.shared.threads import available_threads

from .slot_steps import SlotSteps


class SlotExecutor:
    """An executor whose blocks are slots, and whose steps run on the thread that calls ``result``. A step has either
    prompts or decodes.

    A subclass allocates its slots and then sets ``_steps``.

    Args:
        bundle: the opened bundle.
        target: the target's name.
        blocks: the number of slots to allocate for each cache group; all groups get the smallest of these.
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
        """Does nothing: nothing runs between steps, and memory is freed with the object."""
