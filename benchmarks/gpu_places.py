"""Places where carried kernels run: a GPU, or a rehearsal that looks each kernel up as a GPU would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, cast
from unittest.mock import patch

import torch

from enginewright.plugins.cuda.section import CudaSection
from enginewright.plugins.cuda.serve import executor as cuda_blocks
from enginewright.plugins.cuda.serve.kernels import CarriedLauncher
from enginewright.plugins.cuda.serve.ops import Launcher
from enginewright.plugins.gpu.call import Call
from enginewright.plugins.gpu.carried_kernels import read_by_stem
from enginewright.plugins.gpu.cuda_driver import Device, Graph
from enginewright.plugins.gpu.jit_launcher import JitLauncher, products_in_order
from enginewright.plugins.gpu.sampling import missing_kernels
from enginewright.plugins.gpu.specs import SamplingKernel
from enginewright.plugins.gpu.tiles import GpuLimits, gpu_of, number_of


def section_of(capability: str, *, exact: bool = False) -> CudaSection:
    """The section that programs are packed for; packing and running must use the same one."""
    sizes = {"requests": 256, "chunk": 2048}
    return CudaSection(compute_capabilities=(capability,), dtype="bf16", exact=exact, **sizes)


class Place(Protocol):
    """A device on which works run; ``cuda_blocks`` has the GPU's."""

    @property
    def device(self) -> torch.device: ...

    @property
    def gpu(self) -> GpuLimits:
        """The limits that kernels were compiled for."""

    @property
    def processors(self) -> int: ...

    def entered(self) -> AbstractContextManager[None]:
        """Returns a context in which its stream is the calling thread's."""

    def launcher(self, folder: Path, section: CudaSection) -> Launcher:
        """The launcher of a folder's kernels."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Captures a work as a graph, as ``graphed_steps.Capture`` does."""


class LookedUp(CarriedLauncher):
    """Finds every kernel in a folder, as the launcher of a GPU does, and compiles none.

    Raises BundleError for one that isn't there. ``interpreted``: Triton's interpreter then runs it on the CPU; else
    nothing runs, and results are whatever was in memory.
    """

    def __init__(self, folder: Path, capability: int, *, interpreted: bool) -> None:
        super().__init__(cast(Device, None), folder, capability)
        self._found: set[str] = set()
        self._interpreter = JitLauncher() if interpreted else None

    def bind(self, call: Call) -> Callable[[], object]:
        stem = call.spec(self._capability).stem
        if stem not in self._found:
            read_by_stem(self._folder, stem)
            self._found.add(stem)
        return _nothing if self._interpreter is None else self._interpreter.bind(call)


class Rehearsal:
    """A place without a GPU, which has the kernels and tiles of the capability that was packed for.

    ``device``: "meta" where nothing is computed, and sizes don't matter.
    """

    name = "no GPU: kernels are looked up"
    processors = 132
    capture: Any = None

    def __init__(self, capability: str, *, interpreted: bool, device: str = "cpu") -> None:
        self.gpu = gpu_of(number_of(capability))
        self.device, self._interpreted = torch.device(device), interpreted
        if interpreted:
            products_in_order().__enter__()  # until the process ends

    def entered(self) -> AbstractContextManager[None]:
        """Returns a context that does nothing: there is no stream."""
        return nullcontext()

    def probe(self) -> None:
        """Always answers."""

    def close(self) -> None:
        """Nothing is held."""

    def launcher(self, folder: Path, section: object) -> Launcher:
        """A launcher that only looks kernels up, unless they are interpreted."""
        return LookedUp(folder, self.gpu.capability, interpreted=self._interpreted)

    def missing(self, folder: Path) -> tuple[SamplingKernel, ...]:
        """Sampling kernels that a bundle lacks."""
        return missing_kernels(folder, self.gpu.capability)


@contextmanager
def placed(place: Place | None, *, graphs: bool = True) -> Iterator[None]:
    """Models of the cuda target that are opened meanwhile run at ``place``; None: where they would. Without ``graphs``
    steps are launched call by call."""
    original = cuda_blocks.place_of

    def place_of(section: CudaSection, number: int = 0) -> Any:
        chosen: Any = original(section, number) if place is None else place
        if not graphs:
            chosen.capture = None
        return chosen

    with patch.object(cuda_blocks, "place_of", place_of):
        yield


def _nothing() -> None:
    """The work of a kernel that is looked up."""
