"""Detects that a process has lost its GPU. After some CUDA errors, every later call fails until the process ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from enginewright.runtime.executors.base import Pending
from enginewright.runtime.shared.contracts import StepOutput
from enginewright.runtime.shared.errors import EnginewrightError, RequestError, shown


class GpuHealth:
    """Tests the GPU after each error, and records if it is lost.

    An illegal address, a failed launch or an uncorrectable memory error destroys the process's CUDA context. After
    other errors, such as out of memory, the test succeeds and the next step can run.

    Args:
        probe: waits for all work of the GPU, and raises CUDA's error.

    Attributes:
        lost: the reason why no further step can run; "" if steps can run.
    """

    def __init__(self, probe: Callable[[], object]) -> None:
        self._probe, self.lost = probe, ""

    def check(self) -> None:
        """Raises EnginewrightError if the GPU is lost."""
        if self.lost:
            raise EnginewrightError(self.lost, hint="Open the bundle again in another process.")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context that tests the GPU if its block raises an error. It raises that error, or the error of ``check`` if
        the GPU is lost.
        """
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
    """A submitted step whose result is read within a context. Implements ``executors.base.Pending``.

    Args:
        context: returns the context, such as ``GpuHealth.watched``.
        pending: the step.
    """

    def __init__(self, context: Callable[[], AbstractContextManager[None]], pending: Pending) -> None:
        self._context, self._pending = context, pending

    def result(self) -> StepOutput:
        with self._context():
            return self._pending.result()
