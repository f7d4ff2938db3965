"""Engines of the linear form over slots on a GPU: the runs of a step, by size and padded.

An engine has optimization profiles, each a range of sizes. A run uses the smallest that holds it, or is split into
parts. Past and present of a layer are bound to the same memory, which the engine updates in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.contracts import CacheGroup, StepInput
from enginewright.runtime.shared.errors import BundleError

from ..gpu.cuda_driver import Device
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
from ..steps.paged_section import CacheTensor
from ..steps.slots import SlotRun, mask, plan_runs, slots_of
from .engine_steps import EngineRun, StepMemory, upload_bytes
from .library import Context, Engine, check_tensors, describe_engines
from .slot_profiles import Choice, cut, lengthen, widen


@dataclass(frozen=True)
class Shape:
    """The sizes to which a run is padded. Runs with equal ones share a graph.

    Attributes:
        choice: the engine and profile that run it.
        first: the first slot.
        batch, length: [B, S] of its tokens.
        rows: the rows of logits.
    """

    choice: Choice
    first: int
    batch: int
    length: int
    rows: int


class SlotEngines:
    """Engines that run over slots, [slots, Nkv, C, D] for the keys and the values of each layer. It is an
    ``EngineProgram``.

    Args:
        device: the GPU, open for this thread.
        engines: the loaded engines, in the manifest's order.
        choices: their profiles, all with slots of the same capacity.
        io: the engines' inputs and outputs.
        slots: the number of slots.
        vocab: columns of the logits.

    Raises:
        BundleError: an engine's inputs or outputs differ from ``io``.
        CapacityError: there isn't enough memory.
    """

    def __init__(
        self,
        device: Device,
        engines: Sequence[Engine],
        choices: Sequence[Choice],
        io: LinearIo,
        slots: int,
        vocab: int,
    ) -> None:
        self._capacity = capacity = choices[0].sizes.C
        self._engines, self._choices, self._slots = engines, choices, slots
        self._masks = {group.mask: group.window for group in io.cache_groups}
        self._contexts: dict[Choice, Context] = {}
        _check_engines(engines, io, capacity)
        groups = [group.to_group(capacity) for group in io.cache_groups]
        logits = max(choice.sizes.R[2] for choice in choices), vocab, engines[0].tensors[LOGITS].dtype
        inputs = max(map(self._most_bytes, choices))
        blocks = dict.fromkeys((group.name for group in groups), slots)
        self.memory = StepMemory(device, groups, blocks, inputs, logits, _slot_tensors)
        self._caches = {
            past: (present, (plane.heads, capacity, plane.size))
            for group in groups
            for layer in group.layers
            for (past, present), plane in zip(cache_names(layer), group.planes, strict=True)
        }
        self._scratch = device.allocate(max(engine.scratch_bytes for engine in engines))

    def runs(self, step: StepInput) -> Iterator[EngineRun]:
        """Yields the runs of a step in order, each padded to a profile that holds it.

        Raises RequestError or CapacityError for a step that can't run.
        """
        slot_of = slots_of(step, self.memory.groups, self._slots)
        for run in plan_runs(step, slot_of, self._capacity):
            for choice, part in cut(run, self._choices):
                most, decodes = choice.sizes.R[2], part.ids.shape[1] == 1
                if decodes:
                    wide = widen(part, self._slots, choice.sizes.B[2], self._capacity)
                else:
                    wide = lengthen(part, choice.sizes.S, self._capacity)
                for start in range(0, max(len(wide.wanted), 1), most):  # again for more rows than it gives at once
                    sampled = wide.wanted[start : start + most]
                    rows = min(most, len(wide.ids)) if decodes else rounded(max(len(sampled), 1), choice.sizes.R)
                    batch, length = wide.ids.shape
                    shape = Shape(choice, wide.first, batch, length, rows)
                    order = run.order[wide.order[start : start + most]]
                    yield EngineRun(
                        shape, self._inputs(shape, wide, sampled), partial(self._bound, shape), order, decodes
                    )

    def describe(self) -> dict[str, str | int]:
        """Returns notes on how the engines ran, by name."""
        return describe_engines(self._engines)

    def close(self) -> None:
        """Frees contexts and engines. The device frees the memory."""
        while self._contexts:
            self._contexts.popitem()[1].close()
        for engine in self._engines:
            engine.close()

    def _bound(self, shape: Shape, keep: bool) -> Context:
        """Returns a context for runs of these sizes; with ``keep`` a new one, whose state the graph holds. All contexts
        have one scratch memory.
        """
        engine = self._engines[shape.choice.engine]
        context = None if keep else self._contexts.get(shape.choice)
        if context is None:
            context = engine.context(shape.choice.profile, self.memory.device, self._scratch)
        if not keep:
            self._contexts[shape.choice] = context
        addresses = self.memory.addresses
        shapes = {name: array.shape for name, array in self.memory.inputs.items()}
        for past, (present, slot) in self._caches.items():
            shapes[past] = (shape.batch, *slot)
            cache = self.memory.caches[past]
            addresses |= dict.fromkeys((past, present), cache.address + shape.first * cache.block_bytes)
        context.bind(shapes, addresses)
        return context

    def _inputs(self, shape: Shape, run: SlotRun, wanted: npt.NDArray[np.int64]) -> Mapping[str, npt.NDArray[Any]]:
        """Returns the inputs of a run that computes the logits of the wanted tokens."""
        tensors = self._engines[shape.choice.engine].tensors
        rows = np.zeros(shape.rows, np.int64)
        rows[: len(wanted)] = wanted
        arrays: dict[str, npt.NDArray[Any]] = {
            INPUT_IDS: run.ids,
            # What isn't a request's may stand behind the last position that the model has.
            POSITION_IDS: np.minimum(run.places, self._capacity - 2),
            WRITE_INDEX: run.places[:, 0],
            ROWS: rows,
        }
        for name, window in self._masks.items():
            if name in tensors:  # of an older bundle: newer engines compute it
                arrays[name] = mask(run.places, self._capacity, window)
        return {name: array.astype(tensors[name].dtype) for name, array in arrays.items() if name in tensors}

    def _most_bytes(self, choice: Choice) -> int:
        """Returns the bytes of the inputs of the largest run of a profile."""
        (_, _, batch), (_, _, length), (_, _, rows) = choice.sizes.B, choice.sizes.S, choice.sizes.R
        tokens, none = np.zeros((batch, length), np.int64), np.zeros(0, np.int64)
        inputs = self._inputs(Shape(choice, 0, batch, length, rows), SlotRun(0, tokens, tokens, none, none), none)
        return upload_bytes(array.nbytes for array in inputs.values())


def _slot_tensors(group: CacheGroup, layer: int) -> list[CacheTensor]:
    """Returns the caches of a layer, [slots, Nkv, C, D] each."""
    pairs = zip(cache_names(layer), group.planes, strict=True)
    return [CacheTensor(past, present, group.dtype, plane.shape) for (past, present), plane in pairs]


def _check_engines(engines: Sequence[Engine], io: LinearIo, capacity: int) -> None:
    """Raises BundleError for an engine that isn't of the linear form, or whose slots don't have ``capacity``
    positions.
    """
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
        if engine.tensors[LOGITS].dtype != engines[0].tensors[LOGITS].dtype:
            raise BundleError(f"{engine.path}: its logits are of another type", hint="Export the bundle again.")
