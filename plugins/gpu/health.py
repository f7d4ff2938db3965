"""Checks that a process can still use its GPU: after some errors of CUDA every later call fails until the process
ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from enginewright.runtime.executors.base import Pending
from enginewright.runtime.shared.contracts import StepOutput
from enginewright.runtime.shared.errors import EnginewrightError, RequestError, shown


class GpuHealth:
    """Has the GPU probed after an error, and remembers when it is lost.

    An illegal address, a failed launch or an uncorrectable error of memory ends the process' CUDA context. Running out
    of memory doesn't, nor does a wrong request: then the probe succeeds, and the next step runs.

    Args:
        probe: waits for all that was put on the GPU, and raises what CUDA says.

    Attributes:
        lost: why no step can run any more; "" where one can.
    """

    def __init__(self, probe: Callable[[], object]) -> None:
        self._probe, self.lost = probe, ""

    def check(self) -> None:
        """Raises EnginewrightError where the GPU is lost."""
        if self.lost:
            raise EnginewrightError(self.lost, hint="Open the bundle again in another process.")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, an error has the GPU probed. Raises it, or where the GPU is lost what ``check`` raises."""
        self.check()
        try:
            yield
        except RequestError:  # raised before anything was put on the GPU
            raise
        except (RuntimeError, EnginewrightError) as e:  # torch's errors of CUDA, and the driver's
            try:
                self._probe()
            except (RuntimeError, EnginewrightError):
                self.lost = f"the GPU is lost to this process: {shown(e, 300)}"
                raise EnginewrightError(self.lost, hint="Open the bundle again in another process.") from e
            raise


class WatchedStep:
    """A step that was submitted, whose result is taken while its GPU is ``watched``. See ``executors.base.Pending``."""

    def __init__(self, health: GpuHealth, pending: Pending) -> None:
        self._health, self._pending = health, pending

    def result(self) -> StepOutput:
        with self._health.watched():
            return self._pending.result()
