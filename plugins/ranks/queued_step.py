"""A step that was submitted to all ranks, whose part of this rank runs in the order of submission."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from enginewright.runtime.shared.contracts import StepInput, StepOutput


class QueuedStep:
    """A step that the other ranks have begun. Implements ``executors.base.Pending``.

    Args:
        queue: the begun steps whose part of this rank hasn't run yet, oldest first; includes this one.
        run: runs this rank's part of the oldest step, and removes the step from the queue.
        step: the step's inputs.
    """

    def __init__(self, queue: deque[QueuedStep], run: Callable[[StepInput], StepOutput], step: StepInput) -> None:
        self._queue, self._run, self._step = queue, run, step
        self._output: StepOutput | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Runs this rank's part of earlier steps and then of this one, unless it has run. ``result`` raises its
        error.
        """
        while self in self._queue and self._queue[0] is not self:
            self._queue[0].run()
        if self._output is None and self._error is None:
            try:
                self._output = self._run(self._step)
            except Exception as e:  # noqa: BLE001  who asks for the result gets it
                self._error = e

    def result(self) -> StepOutput:
        """Returns the step's output, after running it if necessary. Raises the errors of its run."""
        self.run()
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output
