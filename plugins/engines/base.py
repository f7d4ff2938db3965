"""The common parts of executors of TensorRT engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Generic, Protocol, TypeVar

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import StepInput, StepOutput
from enginewright.runtime.shared.errors import BundleError, EnginewrightError

from ..gpu.cuda_driver import Device
from ..gpu.health import GpuHealth
from ..native.threads import available_threads
from .library import open_library
from .section import TensorRtSection


class LoadedEngines(Protocol):
    """The engines of a bundle, loaded with their memory on a GPU."""

    def describe(self) -> dict[str, str | int]:
        """Returns notes on the runs, by name; "graph_launches" is the number of steps that launched a CUDA graph."""

    def close(self) -> None:
        """Destroys CUDA graphs, contexts and engines, in this order, and then frees their memory."""


E = TypeVar("E", bound=LoadedEngines)


class EngineExecutor(ABC, Generic[E]):
    """An executor of TensorRT engines. A thread of its own makes all calls to the GPU.

    A subclass calls ``_start`` when the arguments of ``load`` are ready.

    Args:
        section: the section of the target's manifest.
        target: the target's name.
        threads: threads of the sampler on the CPU; 0 means one for each core.

    Raises:
        MissingDependencyError: the library is missing.
        TargetError: it is of another version, or a driver, a GPU of the right kind or a plugin is missing.
    """

    def __init__(self, bundle: Bundle, section: TensorRtSection, target: str, threads: int) -> None:
        self._bundle = bundle
        self._target = target
        self._threads = threads or available_threads()
        self._library = open_library(section, f"target {target!r}")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="enginewright-tensorrt")
        self._health = GpuHealth(self._probe)
        self._open = True

    def submit(self, step: StepInput) -> Future[StepOutput]:
        self._bundle.check_unchanged()
        return self._thread.submit(self._watched, step)

    @property
    def lost(self) -> str:
        """The reason why no step can run any more; "" if one can."""
        return self._health.lost

    def describe(self) -> dict[str, str | int]:
        gpu = self._library.gpu
        return {
            "target": self._target,
            "library": f"{self._library.flavour.name} {self._library.version}",
            "gpu": f"{gpu.name} ({gpu.capability})",
            **self._engines.describe(),
        }

    def close(self) -> None:
        if self._open:
            self._open = False
            with suppress(EnginewrightError) if self.lost else nullcontext():
                self._thread.submit(self._unload).result()
            self._thread.shutdown()

    @abstractmethod
    def _run(self, step: StepInput) -> StepOutput:
        """Runs a step on the GPU's thread."""

    def _watched(self, step: StepInput) -> StepOutput:
        with self._health.watched():
            return self._run(step)

    def _probe(self) -> None:
        self._device.synchronize()

    def _start(self, load: Callable[[Device], E]) -> None:
        """Opens the GPU and loads the engines; if that fails, nothing stays open."""
        try:
            self._device, self._engines = self._thread.submit(self._load, load).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def _load(self, load: Callable[[Device], E]) -> tuple[Device, E]:
        device = self._library.open_device()
        try:
            return device, load(device)
        except BaseException:
            device.close()
            raise

    def _unload(self) -> None:
        self._engines.close()
        self._device.close()


def engine_section(bundle: Bundle, target: str) -> TensorRtSection:
    """Returns the engines' section of a ready target's manifest. Raises BundleError without one, or without engines."""
    section = bundle.target(target).section(TensorRtSection)
    if section is None or not section.engines:
        raise BundleError(f"{bundle.path}: target {target!r} has no engines", hint="Export the bundle again.")
    return section
