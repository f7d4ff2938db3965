"""The protocol of executors, each of which runs the steps of one target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from ..shared.contracts import CacheGroup, ExecutorCaps, StepInput, StepOutput


class Pending(Protocol):
    """A step that was submitted."""

    def result(self) -> StepOutput:
        """Returns the step's output, after waiting for the step or running it. Raises the step's error."""


class Deferred:
    """A step that runs on the calling thread when its result is requested, for executors whose steps keep all cores
    busy.

    A separate thread would have to be woken, and would compete with the calling thread for a core and for Python's
    lock.
    """

    def __init__(self, run: Callable[[StepInput], StepOutput], step: StepInput) -> None:
        self._run, self._step = run, step
        self._output: StepOutput | None = None

    def result(self) -> StepOutput:
        if self._output is None:
            self._output = self._run(self._step)
        return self._output


class Executor(Protocol):
    """A loaded program with its KV cache.

    It runs one step after the other; results are taken in the order of submission. One with several runs in a step is
    ``Interruptible``.

    A step whose result is never taken does no harm: it writes only to slots of its own requests, and a later request
    that gets these slots writes them before it reads them.
    """

    @property
    def caps(self) -> ExecutorCaps:
        """The executor's capabilities."""

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups of the executor's program."""

    @property
    def blocks(self) -> Mapping[str, int]:
        """The number of blocks that are allocated for each cache group, by the group's name."""

    def submit(self, step: StepInput) -> Pending:
        """Submits a step, which runs at once or when its result is requested.

        The caller must not change ``step`` until then.
        """

    def describe(self) -> dict[str, str | int]:
        """Returns facts to show to users, such as the instruction set, the threads or the device."""

    def close(self) -> None:
        """Waits for a running step, and frees the cache."""


@runtime_checkable
class Interruptible(Protocol):
    """An executor whose steps may have several runs (``ExecutorCaps.most_runs``)."""

    def interrupt(self) -> None:
        """Ends a step with several runs after the current run. It can be called from any thread."""
