"""Executor of TensorRT engines in the linear form, of either library: the whole model with slots, on a GPU.

It has never run on a GPU. The tests replace driver and engines by fakes that compute with onnxruntime.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

from enginewright.runtime.bundle.manifest import target_folder
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps, StepInput, StepOutput

from ..gpu.carried_sampling import open_sampler
from ..gpu.cuda_driver import Device, cache_budget
from ..steps.linear_io import LOGITS, linear_io
from ..steps.paged_section import KERNELS_FOLDER
from ..steps.slot_steps import SlotSteps
from .base import EngineExecutor, engine_section
from .library import Library, open_library
from .segments import schedule_of
from .slot_profiles import check_profiles, choices_of
from .slot_runs import EngineSlots, SlotSizes

FREE_SHARE = 0.8
"""The caches' share of the GPU's memory that engines leave, by default: contexts need some as well."""


class TensorRtExecutor(EngineExecutor[EngineSlots]):
    """Runs a model's engines. A KV block is a slot for one request; prefill and decode alternate.

    Args:
        bundle: a bundle with a target whose engines are built, each of the whole model.
        blocks: slots to allocate by cache group; all groups get the smallest number.
        target: the target's name.
        threads: the number of threads of the sampler on the CPU; 0 means one for each core.

    Raises:
        BundleError: the bundle has no such target, or an engine is damaged or differs from the manifest.
        MissingDependencyError: the library is missing.
        TargetError: the library is of another version, or a driver, a GPU of the right kind or a plugin is missing.
        CapacityError: there is not enough memory for the slots.
    """

    def __init__(self, bundle: Bundle, blocks: Mapping[str, int], *, target: str, threads: int = 0) -> None:
        section, io = engine_section(bundle, target), linear_io(bundle, target)
        capacity = slot_capacity_of(bundle, target)
        self.blocks = dict(blocks)
        self.cache_groups: tuple[CacheGroup, ...] = tuple(group.to_group(capacity) for group in io.cache_groups)
        slots = min(self.blocks[group.name] for group in self.cache_groups)
        self.caps = ExecutorCaps(ragged=False, max_requests=slots, kept_slots=True)
        super().__init__(bundle, section, target, threads)

        def load(device: Device) -> EngineSlots:
            folder, vocab = bundle.path / target_folder(target), bundle.model.vocab_size
            engines = [self._library.load_engine(folder / engine.file, engine.sha256) for engine in section.engines]
            logits = [engine.tensors[LOGITS].dtype for engine in engines if LOGITS in engine.tensors]
            return EngineSlots(
                self._library,
                device,
                engines,
                choices_of(section.engines),
                io,
                SlotSizes(slots, capacity, vocab),
                open_sampler(device, folder / KERNELS_FOLDER, slots, vocab, logits),
            )

        self._start(load)
        draws = None if self._engines.sampler.sampler is None else self._engines
        self.caps = replace(self.caps, lacks=self._engines.sampler.lacks, masks=self._engines.sampler.masks)
        self._steps = SlotSteps(self._engines, self.cache_groups, slots, self._threads, draws=draws)

    def _run(self, step: StepInput) -> StepOutput:
        return self._steps.run(step)


def slot_capacity_of(bundle: Bundle, target: str) -> int:
    """Places of a slot (C), which engines fix: requests have one token less. Raises BundleError."""
    choices = choices_of(engine_section(bundle, target).engines)
    return check_profiles(choices, f"{bundle.path}: target {target!r}")


def slot_groups_of(bundle: Bundle, target: str) -> tuple[CacheGroup, ...]:
    """Returns the cache groups, with slots as their blocks. Raises BundleError."""
    capacity = slot_capacity_of(bundle, target)
    return tuple(group.to_group(capacity) for group in linear_io(bundle, target).cache_groups)


def gpu_budget(bundle: Bundle, target: str) -> int:
    """Returns the default bytes for caches: most of the GPU's free memory minus that of engines and weights.

    Segments have no weights in their engines and use the bundle's. Raises CapacityError if nothing is left, and the
    errors of opening the target.
    """
    section = engine_section(bundle, target)
    library = open_library(section, f"target {target!r}")
    with ThreadPoolExecutor(1) as thread:
        free = thread.submit(_free_bytes, library).result()
    engines = sum(engine.bytes for engine in section.engines)
    if (schedule := schedule_of(bundle, target)) is not None:
        engines += sum(bundle.weight(name).nbytes for name in schedule.weight_names)
    return cache_budget(library.gpu.name, free, "the engines", engines, FREE_SHARE)


def _free_bytes(library: Library) -> int:
    with closing(library.open_device()) as device:
        return device.free_bytes()
