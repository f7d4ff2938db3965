"""The protocol of executors, which run the steps of a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ..shared.contracts import CacheGroup, ExecutorCaps, StepInput, StepOutput


class Pending(Protocol):
    """A step that was submitted."""

    def result(self) -> StepOutput:
        """Returns the step's output, after waiting for the step or running it. Raises the step's error."""


class Deferred:
    """A step that runs when its result is asked for, on the thread that asks, as steps do that keep all cores busy.

    Another thread would have to be woken, and to compete with this one for a core and for Python's lock.
    """

    def __init__(self, run: Callable[[StepInput], StepOutput], step: StepInput) -> None:
        self._run, self._step = run, step
        self._output: StepOutput | None = None

    def result(self) -> StepOutput:
        if self._output is None:
            self._output = self._run(self._step)
        return self._output


class Executor(Protocol):
    """A loaded program with its KV cache. Steps run one after the other: results are taken in the order of submission.

    A step whose result was never taken is harmless: it writes only to slots that its requests held, and a later step
    that gives them to another request writes them before it reads them.
    """

    @property
    def caps(self) -> ExecutorCaps:
        """The executor's capabilities."""

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups of its program."""

    @property
    def blocks(self) -> Mapping[str, int]:
        """Cache group -> blocks that it allocated."""

    def submit(self, step: StepInput) -> Pending:
        """Takes a step, which runs from now on or when its result is asked for. Until then it must not change."""

    def describe(self) -> dict[str, str | int]:
        """Returns facts for people: instruction set, threads, device."""

    def close(self) -> None:
        """Waits for a step that still runs, and frees the cache."""
