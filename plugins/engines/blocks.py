"""Targets of TensorRT engines that take packed tokens and caches in blocks: engines with plugins, or segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from enginewright.runtime.bundle.manifest import target_folder
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps, StepInput, StepOutput
from enginewright.runtime.shared.errors import BundleError, CapacityError

from ..gpu.carried_sampling import open_sampler
from ..gpu.cuda_driver import Device
from ..steps.packed_steps import StepLimits
from ..steps.paged_section import KERNELS_FOLDER
from .base import EngineExecutor, engine_section
from .block_runs import PackedProgram, PackedSteps, StepMemory
from .blocks_plugins import PagedEngines, caps_of, limits_of, profile_of_each
from .blocks_segments import SegmentProgram, segment_limits
from .section import TensorRtSection
from .segments import SegmentSchedule, schedule_of

MOST_REQUESTS = 256
"""The most requests of a step in the segments form, whose profiles have no such limit."""


class PackedExecutor(EngineExecutor[PackedSteps]):
    """An executor whose caches are blocks, and whose steps may contain prompts and decodes.

    Args:
        bundle: a bundle with a ready target of the paged form, or of segments.
        blocks: blocks to allocate by cache group; at most the engines' limit.
        context: maximum tokens of a request.
        target: the target's name.
        threads: the number of threads of the sampler on the CPU; 0 means one for each core.

    Raises:
        BundleError: the bundle has no such target, or an engine or kernel is damaged or differs from the manifest.
        MissingDependencyError: the library is missing.
        TargetError: it is of another version, or a driver, a GPU of the right kind or a plugin is missing.
        CapacityError: there is not enough memory for caches, weights and activations.
    """

    def __init__(
        self, bundle: Bundle, blocks: Mapping[str, int], context: int, *, target: str, threads: int = 0
    ) -> None:
        section = engine_section(bundle, target)
        self.cache_groups: tuple[CacheGroup, ...] = packed_groups(bundle, target)
        most = most_blocks(section)
        self.blocks = {name: count if most is None else min(count, most) for name, count in blocks.items()}
        self._limits = _limits(bundle, target, context)
        self.caps = ExecutorCaps(True, self._limits.tokens, self._limits.requests, shared_blocks=True)
        if section.paged is not None:
            self.caps = caps_of(profile_of_each(section))
        super().__init__(bundle, section, target, threads)
        self._start(lambda device: self._steps(bundle, section, device))

    def _run(self, step: StepInput) -> StepOutput:
        return self._engines.run(step)

    def _steps(self, bundle: Bundle, section: TensorRtSection, device: Device) -> PackedSteps:
        try:
            vocab = bundle.model.vocab_size
            memory = StepMemory(device, self.cache_groups, self.blocks, self._limits, vocab)
            folder = bundle.path / target_folder(self._target) / KERNELS_FOLDER
            rows = min(self._limits.rows, self._limits.requests)
            sampler = open_sampler(device, folder, rows, vocab, ())
            self.caps = replace(self.caps, lacks=sampler.lacks, masks=sampler.masks)
            return PackedSteps(
                memory,
                self._program(bundle, section, memory),
                sampler=sampler,
                vocab=vocab,
                threads=self._threads,
                graphs=not self._library.captures_itself or (section.paged is None and self._library.tells_capturable),
            )
        except CapacityError as e:
            caches = sum(cache_block_bytes(group) * self.blocks[group.name] for group in self.cache_groups)
            raise CapacityError(
                f"memory: caches of {caches:,} bytes, and what engines need beside them, don't fit into the memory "
                f"of {device.gpu.name}",
                hint="Pass less memory for the caches, or take a larger GPU.",
            ) from e

    def _program(self, bundle: Bundle, section: TensorRtSection, memory: StepMemory) -> PackedProgram:
        folder = bundle.path / target_folder(self._target)
        engines = {
            engine.file: self._library.load_engine(folder / engine.file, engine.sha256) for engine in section.engines
        }
        if section.paged is not None:
            return PagedEngines(list(engines.values()), profile_of_each(section), section.paged, memory)
        schedule = segment_schedule(bundle, self._target)
        by_name = {segment.name: engines[segment.file] for segment in schedule.segments}
        return SegmentProgram(bundle, self._target, schedule, by_name, memory)


def segment_schedule(bundle: Bundle, target: str) -> SegmentSchedule:
    """Returns the schedule of a target of segments. Raises BundleError if it has none."""
    if (schedule := schedule_of(bundle, target)) is None:
        raise BundleError(f"{bundle.path}: target {target!r} has no segments.json", hint="Export the bundle again.")
    return schedule


def packed_groups(bundle: Bundle, target: str) -> tuple[CacheGroup, ...]:
    """Returns the cache groups of a target of packed steps. Raises BundleError."""
    section = engine_section(bundle, target)
    if section.paged is not None:
        return section.paged.cache_groups
    return segment_schedule(bundle, target).cache_groups


def packed_context(bundle: Bundle, target: str) -> int:
    """Returns the maximum tokens of a request that the engines support. Raises BundleError."""
    section = engine_section(bundle, target)
    if section.paged is None:
        return bundle.model.context_length
    smallest = min(group.block_size for group in section.paged.cache_groups)
    return limits_of(profile_of_each(section)).blocks * smallest


def most_blocks(section: TensorRtSection) -> int | None:
    """Returns the maximum number of blocks of a pool; None if engines have no limit."""
    return None if section.paged is None else min(profile.P[2] for profile in section.paged.profiles)


def _limits(bundle: Bundle, target: str, context: int) -> StepLimits:
    section = engine_section(bundle, target)
    if section.paged is not None:
        return limits_of(profile_of_each(section))
    return segment_limits(segment_schedule(bundle, target), MOST_REQUESTS, context)
