"""Forms of TensorRT engines that take packed tokens and caches in blocks: engines with plugins, or segments."""

from __future__ import annotations

from collections.abc import Mapping

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import ExecutorCaps
from enginewright.runtime.shared.errors import BundleError

from ..gpu.cuda_driver import Device
from .base import engine_section
from .blocks_plugins import PagedEngines, caps_of, limits_of, profile_of_each
from .blocks_segments import SegmentProgram, segment_limits
from .engine_steps import packed_memory
from .library import Engine
from .segments import schedule_of

MOST_REQUESTS = 256
"""The most requests of a step in the segments form, whose profiles have no such limit."""


class PagedForm:
    """The ``EngineForm`` of engines with plugins. Raises BundleError if a target's manifest has none."""

    def __init__(self, bundle: Bundle, target: str) -> None:
        section = engine_section(bundle, target)
        assert section.paged is not None
        self._vocab, self._paged, self._profiles = bundle.model.vocab_size, section.paged, profile_of_each(section)
        self._limits = limits_of(self._profiles)
        self.cache_groups = section.paged.cache_groups
        self.context = self._limits.blocks * min(group.block_size for group in self.cache_groups)
        self.most_blocks: int | None = min(profile.P[2] for profile in section.paged.profiles)

    def caps(self, blocks: Mapping[str, int], context: int) -> ExecutorCaps:
        return caps_of(self._profiles)

    def program(
        self, device: Device, engines: Mapping[str, Engine], blocks: Mapping[str, int], context: int
    ) -> PagedEngines:
        memory = packed_memory(device, self.cache_groups, blocks, self._limits, self._vocab)
        return PagedEngines(list(engines.values()), self._profiles, self._paged, memory)


class SegmentsForm:
    """The ``EngineForm`` of segments. Raises BundleError if a target has no schedule."""

    most_blocks: int | None = None

    def __init__(self, bundle: Bundle, target: str) -> None:
        if (schedule := schedule_of(bundle, target)) is None:
            raise BundleError(f"{bundle.path}: target {target!r} has no segments.json", hint="Export the bundle again.")
        self._bundle, self._target, self._schedule = bundle, target, schedule
        self.cache_groups, self.context = schedule.cache_groups, bundle.model.context_length

    def caps(self, blocks: Mapping[str, int], context: int) -> ExecutorCaps:
        limits = segment_limits(self._schedule, MOST_REQUESTS, context)
        return ExecutorCaps(max_tokens=limits.tokens, max_requests=limits.requests, shared_blocks=True)

    def program(
        self, device: Device, engines: Mapping[str, Engine], blocks: Mapping[str, int], context: int
    ) -> SegmentProgram:
        limits = segment_limits(self._schedule, MOST_REQUESTS, context)
        memory = packed_memory(device, self.cache_groups, blocks, limits, self._bundle.model.vocab_size)
        by_name = {segment.name: engines[segment.file] for segment in self._schedule.segments}
        return SegmentProgram(self._bundle, self._target, self._schedule, by_name, memory, limits)
