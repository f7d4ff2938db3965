"""The executor of TensorRT engines, of either library and in any form.

It has never run on a GPU. The tests replace driver and engines by fakes that compute with onnxruntime or numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Protocol

from enginewright.runtime.bundle.manifest import target_folder
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps, StepInput, StepOutput
from enginewright.runtime.shared.errors import BundleError, CapacityError, EnginewrightError
from enginewright.runtime.shared.threads import available_threads

from ..gpu.carried_sampling import open_sampler
from ..gpu.cuda_driver import Device
from ..gpu.health import GpuHealth
from ..steps.paged_section import KERNELS_FOLDER
from .engine_steps import EngineProgram, EngineSteps
from .library import Engine, open_library
from .section import TensorRtSection


class EngineForm(Protocol):
    """The form of a target's engines: how they take steps.

    Attributes:
        cache_groups: the executor's cache groups.
        context: the most tokens of a request.
        most_blocks: the most blocks of a cache group; None if engines have no limit.
    """

    cache_groups: tuple[CacheGroup, ...]
    context: int
    most_blocks: int | None

    def caps(self, blocks: Mapping[str, int], context: int) -> ExecutorCaps:
        """Returns the executor's capabilities with these blocks, for requests of at most ``context`` tokens."""

    def program(
        self, device: Device, engines: Mapping[str, Engine], blocks: Mapping[str, int], context: int
    ) -> EngineProgram:
        """Returns the loaded engines, by file, with their memory. Raises BundleError, TargetError or CapacityError."""


class EngineExecutor:
    """An executor of TensorRT engines. A thread of its own makes all calls to the GPU.

    Args:
        bundle: a bundle with a target whose engines are built.
        target: the target's name.
        form: the form of its engines.
        blocks: blocks to allocate by cache group; at most the engines' limit.
        context: maximum tokens of a request.
        threads: the number of threads of the sampler on the CPU; 0 means one for each core.

    Raises:
        BundleError: the bundle has no such target, or an engine or kernel is damaged or differs from the manifest.
        MissingDependencyError: the library is missing.
        TargetError: it is of another version, or a driver, a GPU of the right kind or a plugin is missing.
        CapacityError: there is not enough memory for caches, weights and activations.
    """

    def __init__(
        self, bundle: Bundle, target: str, form: EngineForm, blocks: Mapping[str, int], context: int, threads: int
    ) -> None:
        self._bundle, self._target, self._form = bundle, target, form
        self._section = engine_section(bundle, target)
        self.cache_groups = form.cache_groups
        self.blocks = {name: min(count, form.most_blocks or count) for name, count in blocks.items()}
        self.caps = form.caps(self.blocks, context)
        self._library = open_library(self._section, f"target {target!r}")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="enginewright-tensorrt")
        self._health = GpuHealth(lambda: self._device.synchronize())
        self._open = True
        try:
            self._thread.submit(self._load, context, threads or available_threads()).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def submit(self, step: StepInput) -> Future[StepOutput]:
        self._bundle.check_unchanged()
        return self._thread.submit(self._run, step)

    @property
    def lost(self) -> str:
        """The reason why no further step can run; "" if steps can run."""
        return self._health.lost

    def describe(self) -> dict[str, str | int]:
        gpu = self._library.gpu
        return {
            "target": self._target,
            "library": f"{self._library.flavour.name} {self._library.version}",
            "gpu": f"{gpu.name} ({gpu.capability})",
            **self._steps.describe(),
        }

    def close(self) -> None:
        if self._open:
            self._open = False
            with suppress(EnginewrightError) if self.lost else nullcontext():
                self._thread.submit(self._unload).result()
            self._thread.shutdown()

    def _run(self, step: StepInput) -> StepOutput:
        with self._health.watched():
            output = self._steps.run(step)
            if not self.caps.shared_blocks:  # then no step lists blocks to clear
                self._steps.forget(step, output)
            return output

    def _load(self, context: int, threads: int) -> None:
        """Opens the GPU and loads the engines; if that fails, nothing stays open."""
        self._device = device = self._library.open_device()
        folder, library = self._bundle.path / target_folder(self._target), self._library
        try:
            engines = {one.file: library.load_engine(folder / one.file, one.sha256) for one in self._section.engines}
            program = self._form.program(device, engines, self.blocks, context)
            rows, (_, vocab) = self.caps.max_requests, program.memory.logits.shape
            sampler = open_sampler(device, folder / KERNELS_FOLDER, rows, vocab, [program.memory.logits.dtype])
            graphs = not library.captures_itself or (self._section.form == "segments" and library.tells_capturable)
            self._steps = EngineSteps(program, sampler, threads, graphs=graphs)
            self.caps = replace(self.caps, lacks=sampler.lacks, masks=sampler.masks)
        except BaseException as e:
            device.close()
            if not isinstance(e, CapacityError):
                raise
            caches = sum(cache_block_bytes(group) * self.blocks[group.name] for group in self.cache_groups)
            raise CapacityError(
                f"memory: caches of {caches:,} bytes, and what engines need beside them, don't fit into the memory "
                f"of {device.gpu.name}",
                hint="Pass less memory for the caches, serve fewer requests at a time (max_requests), or take a "
                "larger GPU.",
            ) from e

    def _unload(self) -> None:
        self._steps.close()
        self._device.close()


def engine_section(bundle: Bundle, target: str) -> TensorRtSection:
    """Returns the section of the manifest with a ready target's engines. Raises BundleError if it has no such section,
    or no engines.
    """
    section = bundle.target(target).section(TensorRtSection)
    if section is None or not section.engines:
        raise BundleError(f"{bundle.path}: target {target!r} has no engines", hint="Export the bundle again.")
    return section
