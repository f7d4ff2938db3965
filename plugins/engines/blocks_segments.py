"""Runs engines of the parts between attentions, with our attention kernels between them: the segments form.

``plugins.engines.segments`` describes the form. Each step of the schedule that runs an engine has a context of its own,
to which its weights are bound once. This hasn't run on a GPU yet; tests run it with fake engines, kernels and a fake
driver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from enginewright.runtime.bundle.manifest import target_folder
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.dtypes import BYTES_PER_ELEMENT
from enginewright.runtime.shared.errors import BundleError, RequestError

from ..gpu.graphed_steps import Works
from ..steps.packed_steps import StepLimits, StepShape, bucketed, rounded
from ..steps.paged_section import KERNELS_FOLDER
from .carried_kernels import AttentionLaunches
from .engine_steps import PackedProgram, StepMemory
from .library import Context, Engine, check_tensors, describe_engines
from .segments import LOGITS, AttentionStep, SegmentSchedule, SegmentStep, SegmentTensor


class SegmentProgram(PackedProgram):
    """Engines of segments, with kernels between them.

    Args:
        bundle: the bundle with the weights.
        target: the target's name.
        schedule: the target's schedule.
        engines: segment -> its engine, loaded.
        memory: the memory of all steps, with the schedule's cache groups.
        limits: the limits of steps.

    Raises:
        BundleError: an engine differs from the schedule, or a kernel can't be read.
        CapacityError: there is no memory for weights and activations.
    """

    def __init__(
        self,
        bundle: Bundle,
        target: str,
        schedule: SegmentSchedule,
        engines: Mapping[str, Engine],
        memory: StepMemory,
        limits: StepLimits,
    ) -> None:
        self._schedule = schedule
        self._segments = {segment.name: segment for segment in schedule.segments}
        self._engines = engines
        self._groups = {group.name: group for group in memory.groups}
        self._limits = limits
        self.memory = memory
        self._device = memory.device
        for segment in schedule.segments:
            check_tensors(engines[segment.name], [*segment.inputs, *segment.weights], list(segment.outputs))
        self._launches = self._load_kernels(bundle, target)
        self._contexts: dict[tuple[int, int], Context] = {}
        self._last: StepShape | None = None
        self._addresses = self._activations()
        self._weights = self._upload_weights(bundle)
        self._scratch = self._device.allocate(max(engine.scratch_bytes for engine in engines.values()))
        self._nothing = self._device.allocate(4)

    def shape_of(self, tokens: int, requests: int, rows: int, blocks: int, decodes: bool) -> StepShape:
        if requests > self._limits.requests or blocks > self._limits.blocks:
            raise RequestError(
                f"step: {requests} requests with {blocks} blocks are more than the {self._limits.requests} with "
                f"{self._limits.blocks} that there is memory for",
                hint="Plan steps by the executor's caps, and requests by its context.",
            )
        by_size = sorted(enumerate(self._schedule.profiles), key=lambda one: one[1].T[2])
        for index, profile in by_size:
            if tokens <= profile.T[2] and rows <= profile.R[2]:
                return StepShape(
                    profile=index,
                    tokens=rounded(tokens, profile.T) if decodes else bucketed(tokens, profile.T),
                    requests=rounded(requests, (1, 1, self._limits.requests)),
                    rows=rounded(min(requests, profile.R[2]) if decodes else rows, profile.R),
                    blocks=rounded(blocks, (1, 1, self._limits.blocks)),
                    decodes=decodes,
                )
        raise RequestError(
            f"step: no profile holds {tokens} tokens and {rows} rows", hint="Plan steps by the executor's caps."
        )

    def most(self, *, decodes: bool) -> tuple[int, int]:
        return self._limits.tokens, self._limits.requests

    def most_rows(self, shape: StepShape) -> int:
        return self._schedule.profiles[shape.profile].R[2]

    def bound(self, shape: StepShape, keep: bool) -> Works:
        works: list[Callable[[], None]] = [
            self._attention(step, shape)
            if isinstance(step, AttentionStep)
            else self._context(index, step, shape, keep=keep)
            for index, step in enumerate(self._schedule.steps)
        ]
        if not keep:
            self._last = shape
        return Works(works, [work for work in works if isinstance(work, Context)])

    def describe(self) -> dict[str, str | int]:
        return describe_engines(self._engines.values())

    def close(self) -> None:
        while self._contexts:
            self._contexts.popitem()[1].close()
        for engine in self._engines.values():
            engine.close()

    def _context(self, index: int, step: SegmentStep, shape: StepShape, *, keep: bool) -> Context:
        """Returns the context of step ``index`` of the schedule, bound to sizes and addresses.

        ``keep``: True for a context whose state a graph holds, so that no other size is bound to it.
        """
        engine, segment = self._engines[step.segment], self._segments[step.segment]
        context = None if keep else self._contexts.get((index, shape.profile))
        if context is not None and shape == self._last:
            return context
        if context is None:
            context = engine.context(shape.profile, self._device, self._scratch, captured=keep)
            context.place({name: self._weights[source] for name, source in step.weights.items()})
            if not keep:
                self._contexts[index, shape.profile] = context
        sizes = {"T": shape.tokens, "R": shape.rows}
        addresses = self._addresses | self.memory.addresses
        places = {name: addresses[to] for name, to in (step.inputs | step.outputs).items()}
        context.bind({name: _sizes(tensor, sizes) for name, tensor in segment.inputs.items()}, places)
        return context

    def _attention(self, step: AttentionStep, shape: StepShape) -> Callable[[], None]:
        heads = self._schedule.buffers[step.q].shape[1]
        assert isinstance(heads, int)
        buffers = self._addresses | {
            "sinks": self._weights[step.sinks] if step.sinks is not None else self._nothing,
            "slopes": self._weights[step.slopes] if step.slopes is not None else self._nothing,
        }
        launches, group = self._launches[step.layer], self._groups[step.group]

        def run() -> None:
            launches.launch(step, shape, heads, self._schedule.dtype, group, self.memory, buffers)

        return run

    def _load_kernels(self, bundle: Bundle, target: str) -> dict[int, AttentionLaunches]:
        """Loads the kernels for this GPU; returns those of each layer. Raises BundleError if the bundle has none for
        it.
        """
        folder = bundle.path / target_folder(target) / KERNELS_FOLDER
        capability = self._device.gpu.capability
        launches: dict[int, AttentionLaunches] = {}
        for kernels in self._schedule.kernels:
            if kernels.compute_capability == capability:
                launches |= dict.fromkeys(kernels.layers, AttentionLaunches(kernels, folder, self._device))
        missing = [layer for group in self._groups.values() for layer in group.layers if layer not in launches]
        if missing:
            raise BundleError(
                f"{folder}: there are no attention kernels for compute capability {capability}",
                hint=f"Export again with --gpu {capability}.",
            )
        return launches

    def _activations(self) -> dict[str, int]:
        """Returns the maximum bytes of each buffer, and of the partial results of a decode step's attention, by
        name.
        """
        sizes = {"T": self._limits.tokens, "R": self._limits.rows}
        bytes_of = {
            name: math.prod(_sizes(tensor, sizes)) * BYTES_PER_ELEMENT[tensor.dtype]
            for name, tensor in self._schedule.buffers.items()
            if name != LOGITS
        }
        for step in self._schedule.steps:
            if isinstance(step, AttentionStep):
                heads = self._schedule.buffers[step.q].shape[1]
                assert isinstance(heads, int)
                group = self._groups[step.group]
                tokens = min(self._limits.tokens, self._limits.requests)
                needed = self._launches[step.layer].scratch_bytes(heads, group, tokens, self._limits.blocks)
                for name, nbytes in zip(("parts", "lse"), needed, strict=True):
                    bytes_of[name] = max(bytes_of.get(name, 0), nbytes)
        return {name: self._device.allocate(nbytes) for name, nbytes in bytes_of.items()}

    def _upload_weights(self, bundle: Bundle) -> dict[str, int]:
        addresses = {}
        for name in self._schedule.weight_names:
            array = np.ascontiguousarray(bundle.weight(name))
            addresses[name] = self._device.allocate(array.nbytes)
            self._device.upload(addresses[name], array)
        return addresses


def segment_limits(schedule: SegmentSchedule, requests: int, context: int) -> StepLimits:
    """Returns the sizes of the largest step, with at most ``requests`` requests of ``context`` tokens."""
    tokens = max(profile.T[2] for profile in schedule.profiles)
    rows = max(profile.R[2] for profile in schedule.profiles)
    smallest = min(group.block_size for group in schedule.cache_groups)
    return StepLimits(tokens=tokens, requests=min(requests, tokens), rows=rows, blocks=-(-context // smallest))


def _sizes(tensor: SegmentTensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else sizes[size] for size in tensor.shape)
