"""Steps of packed tokens on a GPU, with caches in blocks: memory, padding to a profile, CUDA graphs.

What computes a step is an engine with our plugins (``tensorrt_paged``), or engines with our kernels between them
(``tensorrt_segments``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.contracts import (
    CacheGroup,
    FloatArray,
    Int32Array,
    SamplingBatch,
    StepInput,
    StepOutput,
    as_outputs,
)
from enginewright.runtime.shared.dtypes import BYTES_PER_ELEMENT
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.step_schema import Array

from ..gpu.carried_sampling import OpenedSampler
from ..gpu.cuda_driver import Device
from ..gpu.graphed_steps import GraphedSteps, GraphedWork
from ..gpu.sampling import chosen_rows
from ..native.sampling import RowSampler
from ..steps.packed_steps import HoldsSteps, StepLimits, StepShape, divided, input_sizes, padded
from ..steps.paged_section import cache_tensors


class StepMemory:
    """GPU memory that all steps use: the caches' pools, a step's inputs, and its logits.

    Attributes:
        device: the GPU, open for this thread.
        groups, blocks: cache groups, and the number of blocks of each pool by name.
        limits: the limits of steps.
        caches: address of each cache by its name in ``cache_tensors``.
        logits: f32 [R, V].

    The inputs of a step are contiguous except for alignment, so that one copy transfers all of them.
    """

    def __init__(
        self, device: Device, groups: Sequence[CacheGroup], blocks: Mapping[str, int], limits: StepLimits, vocab: int
    ) -> None:
        """Raises CapacityError where it doesn't fit."""
        self.device = device
        self.groups = tuple(groups)
        self.blocks = dict(blocks)
        self.limits = limits
        self._bytes: dict[str, int] = {}
        self.caches: dict[str, int] = {}
        for group in groups:
            for tensor in (tensor for layer in group.layers for tensor in cache_tensors(group, layer)):
                of_slot = math.prod(tensor.of_slot) * BYTES_PER_ELEMENT[tensor.dtype]
                self._bytes[tensor.name] = of_slot * group.block_size * blocks[group.name]
                self.caches[tensor.name] = device.allocate(self._bytes[tensor.name])
        self._places: dict[tuple[int, int, int, int], dict[str, int]] = {}
        nbytes = sum(_aligned(4 * n) for n in input_sizes(groups, limits).values())
        self._inputs, self._staging = device.allocate(nbytes), device.pinned(nbytes)
        self.logits = device.allocate(4 * limits.rows * vocab)
        self.clear()

    def inputs_of(self, shape: StepShape) -> dict[str, int]:
        """Returns the address of each input in steps of these sizes, by the names of
        ``plugins.steps.paged_section``.
        """
        sizes = (shape.tokens, shape.requests, shape.rows, shape.blocks)
        if sizes not in self._places:
            at = self._inputs
            self._places[sizes] = places = {}
            for name, count in input_sizes(self.groups, shape).items():
                places[name] = at
                at += _aligned(4 * count)
        return self._places[sizes]

    def clear(self) -> None:
        """Makes all caches zero."""
        for name, address in self.caches.items():
            self.device.zero(address, self._bytes[name])

    def prepare(self, step: StepInput) -> None:
        """Clears and copies the blocks that a step lists."""
        for group in self.groups:
            cleared, copied = step.clears.get(group.name), step.copies.get(group.name)
            for layer in group.layers if cleared is not None or copied is not None else ():
                for name in (tensor.name for tensor in cache_tensors(group, layer)):
                    size, address = self._bytes[name] // self.blocks[group.name], self.caches[name]
                    for block in cleared.tolist() if cleared is not None else ():
                        self.device.zero(address + block * size, size)
                    for source, to in copied.tolist() if copied is not None else ():
                        self.device.copy(address + to * size, address + source * size, size)

    def upload(self, arrays: Mapping[str, Array], shape: StepShape) -> None:
        """Copies the inputs of a step of these sizes to the GPU, in one copy, once the copy before is over."""
        self.device.synchronize()
        end = 0
        for name, address in self.inputs_of(shape).items():
            start, array = address - self._inputs, arrays[name]
            end = start + array.nbytes
            self._staging[start:end].view(np.int32)[:] = array.reshape(-1)
        self.device.upload_pinned(self._inputs, self._staging[:end])


def _aligned(nbytes: int) -> int:
    """Rounds bytes up to the alignment of inputs."""
    return -(-nbytes // 256) * 256


class PackedProgram(HoldsSteps, Protocol):
    """A program that computes a padded step, from the inputs in ``StepMemory`` to the logits there."""

    def shape_of(self, tokens: int, requests: int, rows: int, blocks: int, decodes: bool) -> StepShape:
        """Returns the sizes to pad a step to. Raises RequestError if no profile holds the step."""

    def most_rows(self, shape: StepShape) -> int:
        """Returns the most rows of logits in a run, in the profile of ``shape``."""

    def bound(self, shape: StepShape, keep: bool) -> GraphedWork:
        """Returns the work of a step of these sizes, to be run now or, with ``keep`` (for a graph), at any time."""

    def describe(self) -> dict[str, str | int]:
        """Returns facts about its engines for ``LLM.info``: name of the fact -> value."""

    def close(self) -> None:
        """Destroys contexts and engines that aren't cached for other runs. Call it before freeing their memory."""


@dataclass(frozen=True)
class _StepResults:
    """Results of a step's rows, filled run by run: [R] and [R, V]; None for a result that isn't needed."""

    tokens: Int32Array | None
    logits: FloatArray | None


def _decodes(step: StepInput) -> bool:
    return bool((step.counts == 1).all())


class PackedSteps:
    """Runs steps: pads, uploads, launches, samples.

    Steps are put on the stream call by call; decode steps of a shape that comes again are a graph from then on.

    Args:
        memory: the memory of all steps.
        program: the program that computes the steps.
        vocab: columns of the logits.
        threads: the number of threads of the sampler on the CPU.
        sampler: the sampler that draws tokens.
        graphs: True if graphs are made; False where the library makes them by itself.
    """

    def __init__(
        self,
        memory: StepMemory,
        program: PackedProgram,
        *,
        vocab: int,
        threads: int,
        graphs: bool,
        sampler: OpenedSampler,
    ) -> None:
        self._device = memory.device
        self._memory = memory
        self._program = program
        self._vocab = vocab
        self._sampler, self._gpu_sampler = RowSampler(threads), sampler
        capture = self._device.capture if graphs else None
        self._graphs = GraphedSteps[StepShape]("tensorrt", capture, self._device.synchronize)

    def run(self, step: StepInput) -> StepOutput:
        """Runs a step. Raises RequestError for an invalid step, EnginewrightError for other failures."""
        if not len(step.ids):
            raise RequestError("step: it has no tokens", hint="Give it one at least.")
        self._memory.prepare(step)
        results = self._results(step)
        for part, order in divided(step, self._program, decodes=_decodes(step)):
            self._run_part(part, order, step.sampling, results)
        if step.sampling is None:
            return StepOutput(tokens=None, outputs=as_outputs(results.logits))
        if results.tokens is not None:
            return self._sampler.of_drawn(
                results.tokens, results.logits, step.sampling, return_logits=step.wants_logits
            )
        assert results.logits is not None
        return self._sampler.sample(results.logits, step.sampling, return_logits=step.wants_logits)

    def describe(self) -> dict[str, str | int]:
        """Returns notes for people, by name."""
        return self._graphs.describe() | {"sampling": self._gpu_sampler.where} | self._program.describe()

    def close(self) -> None:
        """Frees graphs, then contexts, then engines, all before the memory that they use."""
        self._device.synchronize()
        self._graphs.clear()
        self._program.close()

    def _results(self, step: StepInput) -> _StepResults:
        """Allocates a step's results: tokens if the GPU draws them, logits if the step needs them."""
        rows, sampling = len(step.rows), step.sampling
        draws = sampling is not None and self._gpu_sampler.sampler is not None
        needed = step.wants_logits or (sampling is not None and (not draws or sampling.logprobs is not None))
        return _StepResults(
            np.empty(rows, np.int32) if draws else None,
            np.empty((rows, self._vocab), np.float32) if needed else None,
        )

    def _run_part(
        self, step: StepInput, order: npt.NDArray[np.int64], sampling: SamplingBatch | None, found: _StepResults
    ) -> None:
        """Runs requests, and stores their results.

        If there are more rows than a profile has, the requests run several times; each run writes the same cache
        values.

        Args:
            order: the index of each row in ``found``.
            found: the results to fill.
        """
        tokens, requests = len(step.ids), len(step.kv_len)
        blocks = max(table.shape[1] for table in step.block_tables.values())
        start = 0
        while start < max(len(step.rows), 1):
            left = max(len(step.rows) - start, 1)
            shape = self._program.shape_of(tokens, requests, 1, blocks, _decodes(step))
            rows = step.rows[start : start + min(left, self._program.most_rows(shape))]
            shape = self._program.shape_of(tokens, requests, max(len(rows), 1), blocks, _decodes(step))
            self._memory.upload(padded(step, rows, self._memory.groups, shape), shape)
            self._graphs.run(shape, partial(self._program.bound, shape), comes_again=shape.decodes)
            if len(rows):
                self._take(order[start : start + len(rows)], sampling, found)
            start += max(len(rows), 1)

    def _take(self, rows: npt.NDArray[np.int64], sampling: SamplingBatch | None, found: _StepResults) -> None:
        """Fills in the results of these rows of the step from the stream."""
        if found.tokens is not None:
            assert sampling is not None and self._gpu_sampler.sampler is not None
            found.tokens[rows] = self._gpu_sampler.sampler.draw(self._memory.logits, chosen_rows(sampling, rows))
        if found.logits is not None:
            whole = len(rows) == len(found.logits)
            some = found.logits if whole else np.empty((len(rows), self._vocab), np.float32)
            self._device.download(some, self._memory.logits)
            if not whole:
                found.logits[rows] = some
