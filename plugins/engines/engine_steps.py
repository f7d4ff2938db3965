"""Steps of TensorRT engines on a GPU: memory, one upload for each run, CUDA graphs, sampling.

A step is one run or several. What computes a run is an engine with our plugins (``blocks_plugins``), engines with our
kernels between them (``blocks_segments``), or an engine over slots (``slot_runs``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.contracts import CacheGroup, FloatArray, StepInput, StepOutput, as_outputs
from enginewright.runtime.shared.dtypes import BYTES_PER_ELEMENT
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.step_schema import LOGITS

from ..gpu.call import DeviceArray
from ..gpu.carried_sampling import OpenedSampler
from ..gpu.cuda_driver import Device
from ..gpu.graphed_steps import GraphedSteps, GraphedWork
from ..gpu.sampling import chosen_rows
from ..native.sampling import RowSampler
from ..steps.packed_steps import StepLimits, StepShape, divided, input_sizes, owners_of_bad_rows, padded
from ..steps.paged_section import CacheTensor, cache_tensors


class CacheMemory(NamedTuple):
    """The memory of a tensor of a layer's cache: its blocks, of ``block_bytes`` each, begin at ``address``."""

    address: int
    block_bytes: int


class StepMemory:
    """GPU memory that all steps use: caches, a run's inputs, and its logits.

    Args:
        device: the GPU, open for this thread.
        groups, blocks: cache groups, and the number of blocks of each by name.
        inputs: the bytes of the inputs of the largest run, by ``upload_bytes``.
        logits: the most rows of logits, the number of tokens in the vocabulary, and the logits' type.
        tensors: returns the tensors of a group's layer.

    Attributes:
        caches: the caches by their tensors' names. They begin as zeros, since masked values are multiplied by 0.
        inputs: the inputs of the last upload by name. Uploads of the same sizes have the same addresses.
        logits: [R, V].

    Raises CapacityError if memory runs out.
    """

    def __init__(
        self,
        device: Device,
        groups: Sequence[CacheGroup],
        blocks: Mapping[str, int],
        inputs: int,
        logits: tuple[int, int, npt.DTypeLike],
        tensors: Callable[[CacheGroup, int], Sequence[CacheTensor]] = cache_tensors,
    ) -> None:
        self.device, self.groups, self.blocks = device, tuple(groups), dict(blocks)
        self.caches: dict[str, CacheMemory] = {}
        self._caches_of: dict[str, list[CacheMemory]] = {group.name: [] for group in groups}
        for group in groups:
            for tensor in (tensor for layer in group.layers for tensor in tensors(group, layer)):
                block_bytes = group.block_size * math.prod(tensor.of_slot) * BYTES_PER_ELEMENT[tensor.dtype]
                nbytes = block_bytes * blocks[group.name]
                self.caches[tensor.name] = cache = CacheMemory(device.allocate(nbytes), block_bytes)
                self._caches_of[group.name].append(cache)
                device.zero(cache.address, nbytes)
        self._begin, self._staging = device.allocate(inputs), device.pinned(inputs)
        self.inputs: dict[str, DeviceArray] = {}
        rows, vocab, dtype = logits
        self.logits = DeviceArray(
            device.allocate(rows * vocab * np.dtype(dtype).itemsize), np.dtype(dtype), (rows, vocab)
        )

    @property
    def addresses(self) -> dict[str, int]:
        """The addresses of the inputs and the logits by name."""
        return {name: array.address for name, array in self.inputs.items()} | {LOGITS: self.logits.address}

    def clear(self, group: str, blocks: Iterable[int]) -> None:
        """Sets blocks of a cache group to zero."""
        for block in blocks:
            for cache in self._caches_of[group]:
                self.device.zero(cache.address + block * cache.block_bytes, cache.block_bytes)

    def prepare(self, step: StepInput) -> None:
        """Clears and copies the cache blocks that a step lists in ``clears`` and ``copies``."""
        for name, cleared in step.clears.items():
            self.clear(name, cleared.tolist())
        for name, pairs in step.copies.items():
            for source, to in pairs.tolist():
                for address, size in self._caches_of[name]:
                    self.device.copy(address + to * size, address + source * size, size)

    def upload(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copies the inputs of a run to the GPU, in one copy, once the copy before is over."""
        self.device.synchronize()
        self.inputs, end = {}, 0
        for name, array in arrays.items():
            self.inputs[name] = DeviceArray(self._begin + end, array.dtype, array.shape)
            self._staging[end : end + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
            end += _aligned(array.nbytes)
        self.device.upload_pinned(self._begin, self._staging[:end])


def upload_bytes(sizes: Iterable[int]) -> int:
    """Returns the bytes that arrays of these bytes take in an upload."""
    return sum(map(_aligned, sizes))


def _aligned(nbytes: int) -> int:
    """Rounds a number of bytes up to the alignment of inputs."""
    return -(-nbytes // 256) * 256


class EngineRun(NamedTuple):
    """A run of engines, which computes a step or a part of it.

    Attributes:
        key: equal for runs that have the same work.
        inputs: the arrays that are uploaded before the run.
        bound: returns the run's work after the upload: see ``GraphedSteps.run``.
        order: the indices in the step's rows of the run's rows of logits.
        comes_again: True if other steps are likely to have the same work.
    """

    key: Hashable
    inputs: Mapping[str, npt.NDArray[Any]]
    bound: Callable[[bool], GraphedWork]
    order: npt.NDArray[np.int64]
    comes_again: bool


class EngineProgram(Protocol):
    """Loaded engines with their memory."""

    @property
    def memory(self) -> StepMemory:
        """The memory of all steps."""

    def runs(self, step: StepInput) -> Iterator[EngineRun]:
        """Yields the runs of a step in order. Raises RequestError or CapacityError for a step that can't run."""

    def describe(self) -> dict[str, str | int]:
        """Returns facts about its engines for ``LLM.info``, by name."""

    def close(self) -> None:
        """Destroys contexts and engines that aren't cached for other runs. Call it before freeing their memory."""


class PackedProgram(ABC):
    """An ``EngineProgram`` that computes a step as it is, padded to the sizes of a profile."""

    memory: StepMemory

    def runs(self, step: StepInput) -> Iterator[EngineRun]:
        """Yields the runs of a step in order, each padded to the sizes of a profile.

        If a step has more rows of logits than its profile, its requests are computed several times, each time with
        other rows. Every run writes the same values to the caches.
        """
        for part, order in divided(step, self, decodes=_decodes(step)):
            tokens, requests, decodes = len(part.ids), len(part.kv_len), _decodes(part)
            blocks = max(table.shape[1] for table in part.block_tables.values())
            most = self.most_rows(self.shape_of(tokens, requests, 1, blocks, decodes))
            for start in range(0, max(len(part.rows), 1), most):
                rows = part.rows[start : start + most]
                shape = self.shape_of(tokens, requests, max(len(rows), 1), blocks, decodes)
                inputs = padded(part, rows, self.memory.groups, shape)
                bound = partial(self.bound, shape)
                yield EngineRun(shape, inputs, bound, order[start : start + most], shape.decodes)

    @abstractmethod
    def shape_of(self, tokens: int, requests: int, rows: int, blocks: int, decodes: bool) -> StepShape:
        """Returns the sizes to which a step with these sizes is padded. Raises RequestError if no profile holds the
        step.

        ``decodes``: True if each request has one token.
        """

    @abstractmethod
    def most(self, *, decodes: bool) -> tuple[int, int]:
        """Returns the maximum tokens and requests of a step. ``decodes``: True for steps with one token per request."""

    @abstractmethod
    def most_rows(self, shape: StepShape) -> int:
        """Returns the most rows of logits that a run can compute in the profile of ``shape``."""

    @abstractmethod
    def bound(self, shape: StepShape, keep: bool) -> GraphedWork:
        """Returns the work of a step of these sizes. With ``keep``, which graphs need, it can be run at any later time,
        otherwise only now.
        """


def packed_memory(
    device: Device, groups: Sequence[CacheGroup], blocks: Mapping[str, int], limits: StepLimits, vocab: int
) -> StepMemory:
    """Returns the memory of a ``PackedProgram`` for steps of at most these sizes. Raises CapacityError."""
    inputs = upload_bytes(4 * count for count in input_sizes(groups, limits).values())
    return StepMemory(device, groups, blocks, inputs, (limits.rows, vocab, np.float32))


def _decodes(step: StepInput) -> bool:
    return bool((step.counts == 1).all())


class EngineSteps:
    """Runs steps: uploads, launches or replays a graph, samples.

    Args:
        program: the engines.
        sampler: the sampler on the GPU, if there is one.
        threads: the number of threads of the sampler on the CPU.
        graphs: True if graphs are made; False where the library makes them by itself.
    """

    def __init__(self, program: EngineProgram, sampler: OpenedSampler, threads: int, *, graphs: bool) -> None:
        self._program, self._memory, self._sampler = program, program.memory, sampler
        self._device = device = program.memory.device
        self._cpu_sampler = RowSampler(threads)
        self._graphs = GraphedSteps[Hashable]("tensorrt", device.capture if graphs else None, device.synchronize)

    def run(self, step: StepInput) -> StepOutput:
        """Runs a step. Raises RequestError for an invalid step, EnginewrightError for other failures."""
        if not len(step.ids):
            raise RequestError("step: it has no tokens", hint="Give it one at least.")
        rows, sampling, sampler = len(step.rows), step.sampling, self._sampler.sampler
        tokens = np.empty(rows, np.int32) if sampling is not None and sampler is not None else None
        needs_logits = step.wants_logits or (sampling is not None and (tokens is None or sampling.logprobs is not None))
        logits = np.empty((rows, self._memory.logits.shape[1]), np.float32) if needs_logits else None
        self._memory.prepare(step)
        for run in self._program.runs(step):
            self._memory.upload(run.inputs)
            self._graphs.run(run.key, run.bound, comes_again=run.comes_again)
            if tokens is not None and len(run.order):
                assert sampling is not None and sampler is not None
                options = chosen_rows(sampling, run.order)
                tokens[run.order] = sampler.draw(self._memory.logits.address, options)
            if logits is not None and len(run.order):
                self._download(logits, run.order)
        if sampling is None:
            return StepOutput(tokens=None, outputs=as_outputs(logits))
        if tokens is not None:
            return self._cpu_sampler.of_drawn(tokens, logits, sampling, return_logits=step.wants_logits)
        assert logits is not None
        return self._cpu_sampler.sample(logits, sampling, return_logits=step.wants_logits)

    def forget(self, step: StepInput, output: StepOutput) -> None:
        """Clears the blocks of requests with a row of numbers that aren't finite, if later steps don't list them."""
        if output.tokens is None and output.logits is None:  # the first part of a prompt
            return
        owners = owners_of_bad_rows(step, output.logits, output.tokens)
        for name, table in step.block_tables.items():
            self._memory.clear(name, table[owners].ravel().tolist())

    def describe(self) -> dict[str, str | int]:
        """Returns notes on how steps ran, by name, for ``LLM.info``."""
        return self._graphs.describe() | {"sampling": self._sampler.where} | self._program.describe()

    def close(self) -> None:
        """Frees graphs, then contexts, then engines, all before the memory that they use."""
        self._device.synchronize()
        self._graphs.clear()
        self._program.close()

    def _download(self, logits: FloatArray, rows: npt.NDArray[np.int64]) -> None:
        """Fills in the rows of logits that the last run computed."""
        dtype, whole = self._memory.logits.dtype, len(rows) == len(logits)
        some = logits if whole and dtype == logits.dtype else np.empty((len(rows), logits.shape[1]), dtype)
        self._device.download(some, self._memory.logits.address)
        if some is not logits:
            logits[rows] = some
