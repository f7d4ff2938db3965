"""Targets of TensorRT engines in the linear form: the whole model with slots, on a GPU. For either flavour.

No GPU has run this yet. The tests run it with a driver and engines in memory, where onnxruntime computes what engines
would.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

from enginewright.plugins.contracts import CacheGroup, ExecutorCaps, StepInput, StepOutput
from enginewright.plugins.cpu.threads import available_threads
from enginewright.plugins.errors import BundleError, CapacityError

from ..bundle.linear_io import LinearIo
from ..bundle.manifest import target_folder
from ..bundle.reader import Bundle
from ..bundle.tensorrt_section import TensorRtSection
from .cuda_driver import Device
from .slot_steps import SlotSteps
from .tensorrt_library import Library, open_library
from .tensorrt_slots import EngineSlots, check_profiles, choices_of

FREE_SHARE = 0.8
"""Of the GPU's memory that engines leave, for the caches, where nobody says how much: contexts need some as well."""


class TensorRtExecutor:
    """See ``executors.base.Executor``: blocks are slots, and prefill and decode take turns.

    Everything that touches the GPU runs on a thread of its own.

    Args:
        bundle: with a ready target whose engines are of the whole model.
        blocks: cache group -> slots to allocate; the same number for each.
        target: the target's name.
        threads: of the sampler on the CPU; 0 takes as many as there are cores.

    Raises:
        BundleError: the bundle has no such target, or an engine is damaged or not what the manifest says.
        MissingDependencyError: the library is missing.
        TargetError: it is of another version, or a driver, a GPU of the right kind or a plugin is missing.
        CapacityError: there is no memory for the slots.
    """

    def __init__(self, bundle: Bundle, blocks: Mapping[str, int], *, target: str, threads: int = 0) -> None:
        section, io = engine_section(bundle, target), _linear_io(bundle, target)
        capacity = slot_capacity_of(bundle, target)
        self.blocks = dict(blocks)
        self.cache_groups: tuple[CacheGroup, ...] = tuple(group.to_group(capacity) for group in io.cache_groups)
        slots = min(self.blocks[group.name] for group in self.cache_groups)
        self.caps = ExecutorCaps(ragged=False, max_requests=slots)
        self._target = target
        self._threads = threads or available_threads()
        self._library = open_library(section, f"target {target!r}")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="enginewright-tensorrt")
        self._open = True
        try:
            self._device, self._slots = self._thread.submit(self._load, bundle, section, io, slots, capacity).result()
        except BaseException:
            self._thread.shutdown()
            raise
        self._steps = SlotSteps(self._slots, self.cache_groups, slots, self._threads)

    def submit(self, step: StepInput) -> Future[StepOutput]:
        return self._thread.submit(self._steps.run, step)

    def describe(self) -> dict[str, str | int]:
        gpu = self._library.gpu
        return {
            "target": self._target,
            "library": f"{self._library.flavour.name} {self._library.version}",
            "gpu": f"{gpu.name} ({gpu.capability})",
            "graph_launches": self._slots.graph_launches,
        }

    def close(self) -> None:
        if self._open:
            self._open = False
            self._thread.submit(self._unload).result()
            self._thread.shutdown()

    def _load(
        self, bundle: Bundle, section: TensorRtSection, io: LinearIo, slots: int, capacity: int
    ) -> tuple[Device, EngineSlots]:
        device = self._library.open_device()
        try:
            folder = bundle.path / target_folder(self._target)
            engines = [self._library.load_engine(folder / engine.file) for engine in section.engines]
            made = EngineSlots(
                self._library,
                device,
                engines,
                choices_of(section.engines),
                io,
                slots=slots,
                capacity=capacity,
                vocab=bundle.model.vocab_size,
            )
        except BaseException:
            device.close()
            raise
        return device, made

    def _unload(self) -> None:
        self._slots.close()
        self._device.close()


def engine_section(bundle: Bundle, target: str) -> TensorRtSection:
    """What a ready target's manifest says of its engines. Raises BundleError if that is nothing, or there are none."""
    section = bundle.target(target).tensorrt
    if section is None or not section.engines:
        raise BundleError(f"{bundle.path}: target {target!r} has no engines", hint="Export the bundle again.")
    return section


def slot_capacity_of(bundle: Bundle, target: str) -> int:
    """Places of a slot (C), which engines fix: requests have one token less. Raises BundleError."""
    choices = choices_of(engine_section(bundle, target).engines)
    return check_profiles(choices, f"{bundle.path}: target {target!r}")


def slot_groups_of(bundle: Bundle, target: str) -> tuple[CacheGroup, ...]:
    """The cache groups, with slots as their blocks. Raises BundleError."""
    capacity = slot_capacity_of(bundle, target)
    return tuple(group.to_group(capacity) for group in _linear_io(bundle, target).cache_groups)


def gpu_budget(bundle: Bundle, target: str) -> int:
    """Bytes for the caches where nobody says how many: most of what the engines leave of the GPU's free memory.

    Raises CapacityError if they leave nothing, and what opening the target raises.
    """
    section = engine_section(bundle, target)
    library = open_library(section, f"target {target!r}")
    with ThreadPoolExecutor(1) as thread:
        free = thread.submit(_free_bytes, library).result()
    engines = sum(engine.bytes for engine in section.engines)
    if free <= engines:
        raise CapacityError(
            f"memory: {library.gpu.name} has {free:,} bytes free, and the engines alone need {engines:,}",
            hint="End what else uses the GPU, or take a larger one.",
        )
    return int((free - engines) * FREE_SHARE)


def _free_bytes(library: Library) -> int:
    with closing(library.open_device()) as device:
        return device.free_bytes()


def _linear_io(bundle: Bundle, target: str) -> LinearIo:
    io = bundle.target(target).io
    if io is None:
        raise BundleError(
            f"{bundle.path}: target {target!r} says nothing of its steps", hint="Export the bundle again."
        )
    return io
