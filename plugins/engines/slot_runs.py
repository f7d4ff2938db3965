"""Slots on a GPU, and runs of engines of the linear form over them: profiles by size, padding, CUDA graphs.

An engine has optimization profiles, each a range of sizes. A run uses the smallest that holds it, or is split into
parts. Past and present of a layer are bound to the same memory, which the engine updates in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.contracts import FloatArray, Int32Array, SamplingBatch
from enginewright.runtime.shared.dtypes import BYTES_PER_ELEMENT
from enginewright.runtime.shared.errors import BundleError, CapacityError

from ..gpu.carried_sampling import OpenedSampler
from ..gpu.cuda_driver import Device
from ..gpu.graphed_steps import GraphedSteps
from ..gpu.sampling import chosen_rows
from ..steps.linear_io import (
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    ROWS,
    WRITE_INDEX,
    LinearIo,
    cache_names,
)
from ..steps.packed_steps import rounded
from ..steps.slots import SlotRun, mask
from .library import Context, Engine, Library, check_tensors, describe_engines
from .slot_profiles import Choice, cut, lengthen, widen


@dataclass(frozen=True)
class Shape:
    """The sizes that a run is bound to; runs with equal ones share a graph.

    Attributes:
        choice: the engine and profile that run it.
        first: the first slot.
        batch, length: [B, S] of its tokens.
        rows: rows of logits.
    """

    choice: Choice
    first: int
    batch: int
    length: int
    rows: int


@dataclass(frozen=True)
class SlotSizes:
    """Sizes of slots and logits.

    Attributes:
        slots: how many slots there are.
        capacity: tokens of each (C).
        vocab: columns of the logits.
    """

    slots: int
    capacity: int
    vocab: int


class EngineSlots:
    """The GPU memory of slots, [slots, Nkv, C, D] for the keys and the values of each layer, and engines that run over
    them.

    See ``slot_steps.Slots``. The memory is zeroed first, since masked values are multiplied by 0 and must be finite.

    Args:
        library: the library that loaded the engines.
        device: the GPU, open for this thread.
        engines: the loaded engines, in the manifest's order.
        choices: their profiles.
        io: the engines' inputs and outputs.
        sizes: sizes of the slots and the logits.
        sampler: the sampler that draws tokens.

    Raises:
        BundleError: an engine's inputs or outputs differ from ``io``.
        CapacityError: there isn't enough memory.
    """

    def __init__(
        self,
        library: Library,
        device: Device,
        engines: Sequence[Engine],
        choices: Sequence[Choice],
        io: LinearIo,
        sizes: SlotSizes,
        sampler: OpenedSampler,
    ) -> None:
        slots, capacity = sizes.slots, sizes.capacity
        self.length = capacity
        self.sampler = sampler
        self._device = device
        self._engines = engines
        self._choices = choices
        self._slots = slots
        self._vocab = sizes.vocab
        self._masks = {group.mask: group.window for group in io.cache_groups}
        self._contexts: dict[Choice, Context] = {}
        capture = None if library.captures_itself else device.capture
        self._graphs = GraphedSteps[Shape]("tensorrt", capture, device.synchronize)
        _check_engines(engines, io, capacity)
        self._memory: dict[str, _Cache] = {}
        for group in io.cache_groups:
            for layer in group.layers:
                for (past, present), plane in zip(cache_names(layer), group.planes, strict=True):
                    shape = (plane.heads, capacity, plane.size)
                    row = math.prod(shape) * BYTES_PER_ELEMENT[group.dtype]
                    self._memory[past] = _Cache(past, present, shape, row, self._allocate(row * slots))
        self._small = {name: self._allocate(size) for name, size in self._largest().items()}
        self._scratch = self._allocate(max(engine.scratch_bytes for engine in engines))
        self.clear()

    def fit(self, slot_of: Int32Array, kv_len: Int32Array) -> None:
        """Does nothing, as the engines' slots have a fixed length."""

    def run(self, run: SlotRun) -> FloatArray:
        logits = np.empty((len(run.wanted), self._vocab), np.float32)
        for rows, dtype in self._parts(run):
            logits[rows] = self._download(len(rows), dtype)
        return logits

    def draw(self, run: SlotRun, sampling: SamplingBatch, *, logits: bool) -> tuple[Int32Array, FloatArray | None]:
        """Draws the tokens of a run. Implements `slot_steps.Draws`, if there is a sampler."""
        assert self.sampler.sampler is not None
        tokens = np.empty(len(run.wanted), np.int32)
        logit_rows = np.empty((len(run.wanted), self._vocab), np.float32) if logits else None
        for rows, dtype in self._parts(run):
            tokens[rows] = self.sampler.sampler.draw(self._small[LOGITS], chosen_rows(sampling, run.order[rows]))
            if logit_rows is not None:
                logit_rows[rows] = self._download(len(rows), dtype)
        return tokens, logit_rows

    def _parts(self, run: SlotRun) -> Iterator[tuple[npt.NDArray[np.int64], np.dtype[Any]]]:
        """Runs the engines as often as needed; yields after each run the indices of the tokens with logits, and their
        type.
        """
        for choice, part in cut(run, self._choices):
            most, decodes = choice.sizes.R[2], part.ids.shape[1] == 1
            if decodes:
                wide = widen(part, self._slots, choice.sizes.B[2], self.length)
            else:
                wide = lengthen(part, choice.sizes.S, self.length)
            for start in range(0, max(len(wide.wanted), 1), most):  # the same again for more rows than it gives at once
                some = wide.wanted[start : start + most]
                rows = min(most, len(wide.ids)) if decodes else rounded(max(len(some), 1), choice.sizes.R)
                batch, length = wide.ids.shape
                self._run(Shape(choice, wide.first, batch, length, rows), wide, some)
                if len(some):  # of a prompt's part nobody waits for any
                    yield wide.order[start : start + most], self._engines[choice.engine].tensors[LOGITS].dtype

    def forget(self, slots: Int32Array) -> None:
        for cache in self._memory.values():
            for slot in slots.tolist():
                self._device.zero(cache.address + slot * cache.row_bytes, cache.row_bytes)

    def clear(self) -> None:
        for cache in self._memory.values():
            self._device.zero(cache.address, cache.row_bytes * self._slots)

    def describe(self) -> dict[str, str | int]:
        """Returns notes on how the engines ran, by name."""
        return self._graphs.describe() | {"sampling": self.sampler.where} | describe_engines(self._engines)

    def close(self) -> None:
        """Frees graphs, contexts and engines, in this order. The device frees the memory."""
        self._device.synchronize()
        self._graphs.clear()
        while self._contexts:
            self._contexts.popitem()[1].close()
        for engine in self._engines:
            engine.close()

    def _run(self, shape: Shape, part: SlotRun, wanted: npt.NDArray[np.int64]) -> None:
        """Enqueues a part on the stream; it computes the logits of the wanted tokens, [R, V]."""
        self._upload(self._engines[shape.choice.engine], shape, part, wanted)
        self._graphs.run(shape, partial(self._bound, shape), comes_again=shape.length == 1)

    def _download(self, rows: int, dtype: np.dtype[Any]) -> FloatArray:
        logits = np.empty((rows, self._vocab), dtype)
        self._device.download(logits, self._small[LOGITS])
        return logits.astype(np.float32, copy=False)

    def _bound(self, shape: Shape, keep: bool) -> Context:
        """Returns a context for runs of these sizes; with ``keep`` a new one, whose state the graph holds. All contexts
        have one scratch memory.
        """
        engine = self._engines[shape.choice.engine]
        context = None if keep else self._contexts.get(shape.choice)
        if context is None:
            context = engine.context(shape.choice.profile, self._device, self._scratch)
        if not keep:
            self._contexts[shape.choice] = context
        shapes = {name: dims for name, dims in self._shapes(shape).items() if name in engine.tensors}
        addresses = {name: self._small[name] for name in (*shapes, LOGITS)}
        for cache in self._memory.values():
            shapes[cache.past] = (shape.batch, *cache.shape)
            at = cache.address + shape.first * cache.row_bytes
            addresses |= {cache.past: at, cache.present: at}
        context.bind(shapes, addresses)
        return context

    def _upload(self, engine: Engine, shape: Shape, part: SlotRun, wanted: npt.NDArray[np.int64]) -> None:
        rows = np.zeros(shape.rows, np.int64)
        rows[: len(wanted)] = wanted
        arrays: dict[str, npt.NDArray[Any]] = {
            INPUT_IDS: part.ids,
            # What isn't a request's may stand behind the last position that the model has.
            POSITION_IDS: np.minimum(part.places, self.length - 2),
            WRITE_INDEX: part.places[:, 0],
            ROWS: rows,
        }
        for name, window in self._masks.items():
            if name in engine.tensors:  # of an older bundle: newer engines compute it
                arrays[name] = mask(part.places, self.length, window)
        for name in arrays.keys() & engine.tensors.keys():
            array = np.ascontiguousarray(arrays[name], engine.tensors[name].dtype)
            self._device.upload(self._small[name], array)

    def _shapes(self, shape: Shape) -> dict[str, tuple[int, ...]]:
        batch, length = shape.batch, shape.length
        shapes: dict[str, tuple[int, ...]] = {
            INPUT_IDS: (batch, length),
            POSITION_IDS: (batch, length),
            WRITE_INDEX: (batch,),
            ROWS: (shape.rows,),
        }
        return shapes | dict.fromkeys(self._masks, (batch, 1, length, self.length))

    def _largest(self) -> dict[str, int]:
        """Returns the maximum bytes of each small input, and of the logits, by name."""
        sizes: dict[str, int] = {LOGITS: 0}
        for choice in self._choices:
            most = choice.sizes
            tensors = self._engines[choice.engine].tensors
            shapes = self._shapes(Shape(choice, 0, most.B[2], most.S[2], most.R[2]))
            shapes[LOGITS] = (most.R[2], self._vocab)
            for name in shapes.keys() & tensors.keys():
                bytes_of = math.prod(shapes[name]) * tensors[name].dtype.itemsize
                sizes[name] = max(sizes.get(name, 0), bytes_of)
        return sizes

    def _allocate(self, nbytes: int) -> int:
        try:
            return self._device.allocate(nbytes)
        except CapacityError as e:
            raise CapacityError(
                f"memory: {self._slots} slots of {self.length} tokens don't fit into the memory of "
                f"{self._device.gpu.name}",
                hint="Pass less memory, or serve fewer requests at a time (max_requests).",
            ) from e


@dataclass(frozen=True)
class _Cache:
    """The keys or the values of a layer: slots of ``row_bytes``, each of ``shape`` [Nkv, C, D]."""

    past: str
    present: str
    shape: tuple[int, ...]
    row_bytes: int
    address: int


def _check_engines(engines: Sequence[Engine], io: LinearIo, capacity: int) -> None:
    """Raises BundleError for an engine that isn't of the linear form, or for other slots."""
    pairs = [pair for group in io.cache_groups for layer in group.layers for pair in cache_names(layer)]
    optional = [POSITION_IDS, WRITE_INDEX, ROWS, *(group.mask for group in io.cache_groups)]
    for engine in engines:
        check_tensors(engine, [INPUT_IDS, *(past for past, _ in pairs)], [LOGITS, *(p for _, p in pairs)], optional)
        for past, _ in pairs:
            places = engine.tensors[past].shape[2]
            if places not in (-1, capacity):
                raise BundleError(
                    f"{engine.path}: {past} has {places} places, and the target's manifest says {capacity}",
                    hint="Export the bundle again.",
                )
