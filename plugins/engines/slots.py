"""The linear form of TensorRT engines: the whole model with slots, on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import ExecutorCaps

from ..gpu.cuda_driver import Device, cache_budget
from ..steps.linear_io import linear_io
from .base import engine_section
from .library import Engine, Library, open_library
from .segments import schedule_of
from .slot_profiles import check_profiles, choices_of
from .slot_runs import SlotEngines

FREE_SHARE = 0.8
"""The caches' share of the GPU's memory that engines leave, by default: contexts need some as well."""


class SlotForm:
    """The ``EngineForm`` of TensorRT engines that compute the whole model: each request has one slot as its cache.

    A slot counts as a cache block. All cache groups get the number of slots of the smallest. A step has either prompts
    or decodes.

    Args:
        bundle: the bundle.
        target: the name of a target with such engines.

    Attributes:
        cache_groups: the cache groups, with slots as blocks.
        context: the most tokens of a request: one fewer than the positions of a slot, as padding writes to the last.
        most_blocks: None, as engines don't limit the number of slots.

    Raises BundleError if the target has no such engines, if their profiles have slots of different lengths, or if no
    profile holds some number of requests or tokens below the largest.
    """

    most_blocks: int | None = None

    def __init__(self, bundle: Bundle, target: str) -> None:
        self._io, self._vocab = linear_io(bundle, target), bundle.model.vocab_size
        self._choices = choices_of(engine_section(bundle, target).engines)
        capacity = check_profiles(self._choices, f"{bundle.path}: target {target!r}")
        self.cache_groups = tuple(group.to_group(capacity) for group in self._io.cache_groups)
        self.context = capacity - 1

    def caps(self, blocks: Mapping[str, int], context: int) -> ExecutorCaps:
        return ExecutorCaps(ragged=False, max_requests=self._slots(blocks), kept_slots=True)

    def program(
        self, device: Device, engines: Mapping[str, Engine], blocks: Mapping[str, int], context: int
    ) -> SlotEngines:
        slots = self._slots(blocks)
        return SlotEngines(device, list(engines.values()), self._choices, self._io, slots, self._vocab)

    def _slots(self, blocks: Mapping[str, int]) -> int:
        return min(blocks[group.name] for group in self.cache_groups)


def gpu_budget(bundle: Bundle, target: str) -> int:
    """Returns the default bytes for caches: most of the GPU's free memory, less the memory of engines and weights.

    In the segments form, weights are in the bundle and not in the engines. Raises CapacityError if nothing is left, and
    the errors of opening the target.
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
