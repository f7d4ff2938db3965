"""Waiting in tests: for an event that must happen, and never for a time that must suffice.

A machine may be busy with other things, and tests must pass there too. A limit is there only so that what never happens
is a failure, and the run goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

HANG = 600.0
"""Seconds after which nobody believes any more that it will happen. What is waited for takes a few, or a minute."""


def wait_until(condition: Callable[[], object], said: Callable[[], object] = lambda: "") -> None:
    """Returns once the condition holds. After HANG seconds it fails, and ``said`` is what the failure shows."""
    limit = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < limit, said()
        time.sleep(0.001)


class Held:
    """Lets an executor take a number of steps; the next one waits until ``release`` is called."""

    def __init__(self, executor: object, steps: int) -> None:
        self._free = threading.Semaphore(steps)
        self._released = threading.Event()
        run = executor.run  # type: ignore[attr-defined]

        def held(step: object) -> object:
            if not self._free.acquire(blocking=False):
                assert self._released.wait(HANG), "a step was held, and never released"
            return run(step)

        executor.run = held  # type: ignore[attr-defined]

    def release(self) -> None:
        """Lets steps wait for nothing from now on."""
        self._released.set()
