"""A lowered program on a GPU, or on the CPU with interpreted kernels: its memory, and steps that are bound to it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from enginewright.runtime.shared.contracts import STATE, CacheGroup
from enginewright.runtime.shared.dtypes import DTYPES, Dtype, stored_bytes
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.kv_formats import SCALED_CACHES
from enginewright.runtime.shared.lowered_program import LoweredProgram, Operand, Step, WeightUse
from enginewright.runtime.shared.step_schema import Q_START, ROWS

from ...gpu.call import Call, DeviceArray
from ...gpu.sampling_calls import SamplingMemory
from ...gpu.specs import AttentionShape, attention_scratch, splits_of
from ...gpu.step_calls import (
    FLOATS_OF,
    LayerCaches,
    Stored,
    laid_by_group,
    split_scratch,
    work_call,
    work_size,
)
from ...gpu.tiles import FORMS, ROTATED_CODES, GpuLimits, Tile, exact_tile
from ...steps.packed_steps import StepLimits, StepShape
from .exchange import Exchange
from .ops import (
    EXCHANGED,
    HANDLERS,
    STORED,
    Cache,
    Launcher,
    Room,
    States,
    Work,
    attended_heads,
    exchanged_bytes,
    heads_bytes,
    unpacked_bytes,
    written_bytes,
)

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    name: torch.uint8 if DTYPES[name].bits == 4 else getattr(torch, DTYPES[name].torch) for name in get_args(Dtype)
}
"""The torch types of buffers, weights and caches; values of 4 bits are two to a byte."""


class BoundStep(NamedTuple):
    """The launches of a step of one size, which are bound to memory.

    Attributes:
        works: the functions that run it, in order.
        outputs: its outputs by name, [R, width].
        by_row: those of the functions that compute something for each of the R sampled rows. If their inputs are kept,
            they can run again with other rows.
    """

    works: list[Work]
    outputs: dict[str, Tensor]
    by_row: list[Work]


@dataclass(frozen=True)
class Place:
    """A device, and the launcher of its kernels.

    Attributes:
        device: "cuda" or one of several GPUs; "cpu" with an interpreting launcher; "meta" to collect calls only.
        gpu: the limits of the GPU that kernels are compiled for.
        launcher: launches kernels.
        processors: the number of the GPU's multiprocessors.
    """

    device: torch.device
    gpu: GpuLimits
    launcher: Launcher
    processors: int = 1


class CudaProgram:
    """A program with its memory: arena, weights, caches, inputs.

    Args:
        program: a program lowered for the cuda target.
        weights: name -> weight of the bundle, on the device. ``lay_narrow`` replaces quantized ones.
        place: the device that runs it.
        blocks: cache group -> the number of blocks in its pool.
        limits: the limits of steps.
        exchange: the collectives, for one of several ranks; None for a single rank.
        exact: True if a token's bits must not depend on the step that computes it.

    Attributes:
        caches: GROUP/LAYER -> a layer's cache, views of ``pools``.
        pools: cache group -> the memory of all its layers: see ``_new_pools``.
        ranked: True for one of several ranks, whose steps exchange data.
    """

    def __init__(
        self,
        program: LoweredProgram,
        weights: dict[str, Tensor],
        place: Place,
        *,
        blocks: Mapping[str, int],
        limits: StepLimits,
        exchange: Exchange | None = None,
        exact: bool = False,
    ) -> None:
        self.exact = exact
        self._exchange, self.ranked = exchange, exchange is not None
        self.program, self.limits, self.gpu = program, limits, place.gpu
        self.device, self.processors = place.device, place.processors
        self._lists: dict[int, Tensor] = {}
        self._listed: set[int] = set()
        self._launcher = place.launcher
        self._laid = lay_narrow(program, weights)
        self._weights = weights
        self._uses = {use.name: use for use in program.weights}
        self.groups = program.cache_groups
        self.pools = {group.name: _new_pools(group, blocks[group.name], self.device) for group in self.groups}
        self.caches = {
            f"{group.name}/{layer}": _cache_of(group, [pool.select(0, number) for pool in self.pools[group.name]])
            for group in self.groups
            for number, layer in enumerate(group.layers)
        }
        begins, most = _memory_of_regions(program, limits)
        self.arena = torch.empty(most, dtype=torch.uint8, device=self.device)
        self._typed = {name: self.arena.view(dtype) for name, dtype in TORCH_DTYPES.items()}
        self._places = {b.name: b.offset + begins[b.region] for b in program.buffers if b.offset is not None}
        self._rooms = {
            name: torch.empty(size, dtype=torch.uint8, device=self.device)
            for name, size in room_bytes(program, limits, exact).items()
        }
        self._scratch = torch.empty(
            max(scratch_floats(program, limits, exact), 1), dtype=torch.float32, device=self.device
        )
        self._biases: dict[str, Tensor] = {}
        self._taps: dict[str, Tensor] = {}
        self._sizes = (0, 0, 0)
        self._decodes = self._mixed = False
        self._inputs: Mapping[str, Tensor] = {}
        self._kept: dict[Operand, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of weights, arena and scratch memory, without caches."""
        weights = sum(weight.nbytes for weight in self._weights.values())
        rooms = sum(room.nbytes for room in self._rooms.values())
        return weights + self.arena.nbytes + self._scratch.nbytes + rooms

    def bound(
        self, shape: StepShape, inputs: Mapping[str, Tensor], *, taps: bool = False, keeps: bool = False
    ) -> BoundStep:
        """Binds the launches of a step of these sizes. A rank may have no outputs.

        Args:
            shape: the step's sizes.
            inputs: the step's inputs at fixed addresses, by the names in ``runtime.shared.step_schema``.
            taps: True to add hidden states to the outputs.
            keeps: True to keep the inputs of ``BoundStep.by_row`` until the next step.

        Raises:
            BundleError: the program has an op that the target doesn't support.
        """
        self._sizes = (shape.tokens, shape.requests, shape.rows)
        self._decodes, self._mixed = shape.decodes, shape.mixed
        self._inputs, self._listed = inputs, set()
        works: list[Work] = []
        outputs = {name: self._view(output) for name, output in self.program.outputs.items()}
        tapped = {place: name for name, place in self.program.taps.items()} if taps else {}
        of_rows: list[Work] = []
        self._kept, shared = {}, set(kept_for_rows(self.program) if keeps else ())
        steps_by_row = set(_steps_by_row(self.program))
        for index, step in enumerate(self.program.steps):
            by_row = index in steps_by_row
            if by_row:
                works += [self._keep(of) for of in dict.fromkeys(step.inputs) if of in shared and of not in self._kept]
            handler = HANDLERS.get(step.op)
            if handler is None:
                raise BundleError(
                    f"step {index} ({step.op} at {step.where}): the cuda target has no such op",
                    hint="Export the bundle again, with this version of Enginewright.",
                )
            step_works = handler(self, step, *self._operands(step))
            works += step_works
            of_rows += step_works if by_row else ()
            for slot, output in enumerate(step.outputs):
                if (name := tapped.get((index, slot))) is not None:
                    values = self._view(output)
                    outputs[name] = self._tap(name, output, self.limits.rows)[: shape.rows]
                    if keeps and not by_row:
                        whole = self._tap(f"{name}, of all tokens", output, self.limits.tokens)[: shape.tokens]
                        works.append(partial(whole.copy_, values))
                        values = whole
                    works.append(self._take_rows(values, outputs[name], by_row))
                    of_rows.append(works[-1])
        return BoundStep(works, outputs, of_rows)

    def _tap(self, name: str, output: Operand, count: int) -> Tensor:
        """Returns memory for rows of a tap, [count, width], which steps of all sizes share."""
        if name not in self._taps:
            shape = (count, output.shape[1].constant)
            self._taps[name] = torch.empty(shape, dtype=TORCH_DTYPES[output.dtype], device=self.device)
        return self._taps[name]

    def _take_rows(self, values: Tensor, to: Tensor, by_row: bool) -> Work:
        """Returns a function that copies the sampled rows of ``values`` to ``to``.

        ``by_row``: True if ``values`` has only the sampled rows.
        """
        if by_row:
            return lambda: to.copy_(values)
        rows = self._inputs[ROWS]
        return lambda: to.copy_(values.index_select(0, rows))

    def _keep(self, operand: Operand) -> Work:
        """Returns a function that copies a value. Steps that are bound from now on read the copy."""
        values = self._view(operand)
        begin = sum(-(-of.nbytes // 16) * 16 for of in self._kept.values())
        memory = self.room("kept", (begin + values.nbytes,), torch.uint8)[begin:]
        copy = self._kept[operand] = memory.view(values.dtype).view(values.shape)
        return partial(copy.copy_, values)

    def close(self) -> None:
        """Frees all memory, including the weights."""
        self._weights, self._inputs, self._kept = {}, {}, {}
        for held in (self.caches, self.pools, self._typed, self._biases, self._lists, self._rooms, self._taps):
            held.clear()
        self.arena = self._scratch = torch.empty(0, device=self.device)

    def clear(self, group: str, blocks: Sequence[int]) -> None:
        """Sets blocks of a cache group to zero."""
        places = self._uploaded(blocks)
        for pool in self.pools[group]:
            pool.index_fill_(1, places, 0)

    def copy(self, group: str, pairs: Iterable[Sequence[int]]) -> None:
        """Copies blocks of a cache group, as pairs (from, to), one after the other."""
        sources: dict[int, int] = {}  # block -> the block whose content it gets, before any copy
        for source, to in pairs:
            sources[to] = sources.get(source, source)
        begins, ends = self._uploaded(sources.values()), self._uploaded(sources)
        for pool in self.pools[group]:
            at_once = max(1, _MOST_COPIED // (len(sources) * pool[0, 0].nbytes))
            for layers in pool.split(at_once):
                layers.index_copy_(1, ends, layers.index_select(1, begins))

    def block_bytes(self, group: str) -> int:
        """Returns the bytes of a block in all layers of a cache group."""
        return sum(pool[:, 0].nbytes for pool in self.pools[group])

    def read_block(self, group: str, block: int, to: Tensor) -> None:
        """Copies the bytes of a block in all layers of a cache group to ``to``, uint8 on the device."""
        for memory, part in self._block_parts(group, block, to):
            part.copy_(memory)

    def write_block(self, group: str, block: int, payload: Tensor) -> None:
        """Fills a block with the bytes of ``read_block``, from the device or the host."""
        for memory, part in self._block_parts(group, block, payload):
            memory.copy_(part)

    def _block_parts(self, group: str, block: int, payload: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Returns the block in each pool of a group, with its part of ``payload`` in the same type and shape."""
        pools = [pool[:, block] for pool in self.pools[group]]
        parts = payload.split([memory.nbytes for memory in pools])
        return [(memory, part.view(memory.dtype).view(memory.shape)) for memory, part in zip(pools, parts, strict=True)]

    def _uploaded(self, blocks: Iterable[int]) -> Tensor:
        """Returns numbers of blocks on the device. The host doesn't wait for the copy."""
        listed = torch.tensor(list(blocks), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return listed.to(self.device, non_blocking=True)

    # ---- operands

    def _operands(self, step: Step) -> tuple[list[Any], list[Tensor]]:
        linked = _linked(step)  # ranks that share no memory have none between stages
        inputs = [operand for operand in step.inputs if operand.name not in linked]
        return [self._operand(operand) for operand in inputs], [
            self._view(operand) for operand in step.outputs if operand.name not in linked
        ]

    def _operand(self, operand: Operand) -> Any:
        if operand.kind == "cache":
            return self.caches[operand.name]
        if operand.kind == "input":
            return self._inputs[operand.name]
        if operand in self._kept:
            return self._kept[operand]
        return self._view(operand)

    def _view(self, operand: Operand) -> Tensor:
        shape, strides = ([v.evaluate(*self._sizes) for v in values] for values in (operand.shape, operand.strides))
        offset = operand.offset.evaluate(*self._sizes)
        if operand.kind == "weight":
            use, weight = self._uses[operand.name], self._weights[operand.name]
            if use.dtype in ("i4", "u4") or operand.name in self._laid or tuple(shape) == tuple(weight.shape):
                return weight
            return torch.as_strided(weight, shape, strides, offset)
        place = self._places[operand.name]
        memory = self._typed[operand.dtype]
        at = place.evaluate(*self._sizes) // memory.element_size() + offset
        return torch.as_strided(memory, shape, strides, at)

    def stored(self, step: Step, inputs: Sequence[Any]) -> tuple[Stored, list[Any]]:
        """Returns the weight of an op in ``STORED``, and the inputs after the weight, its scales and offsets."""
        first, group = STORED[step.op]
        use = self._uses[step.inputs[first].name]
        form = FORMS.get(use.dtype, "float")
        if form == "float":
            return Stored(inputs[first]), list(inputs[first + 1 :])
        rest = list(inputs[first + 1 :])
        scales = rest.pop(0)
        offsets = rest.pop(0) if step.attrs.get("has_offsets") else None
        laid = step.inputs[first].name in self._laid
        return Stored(inputs[first], form, scales, offsets, int(step.attrs.get(group, 0)), laid), rest

    def bias_like(self, bias: Tensor, out: Tensor) -> Tensor:
        """Returns a bias [N] in the type of ``out``; the conversion is cached."""
        if bias.dtype == out.dtype:
            return bias
        name = f"{bias.data_ptr() if bias.device.type != 'meta' else id(bias)}:{out.dtype}"
        return self._biases.setdefault(name, bias.to(out.dtype))

    def scratch(self) -> Tensor:
        """Returns float32 memory for the results of attention's splits, or for the parts of a product."""
        return self._scratch

    def room(self, name: Room, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns the temporary memory of the kind ``name`` as a tensor of this shape and type."""
        size = math.prod(shape) * dtype.itemsize
        return self._rooms[name].narrow(0, 0, size).view(dtype).view(*shape)

    @property
    def exchange(self) -> Exchange:
        """The collectives between ranks. Raises BundleError if there is one rank."""
        if self._exchange is None:
            raise BundleError("program: it is of several ranks, and there is one", hint="Export the bundle again.")
        return self._exchange

    def work(self, cache: Cache, table: Tensor, kv_len: Tensor, window: int, works: list[Work]) -> Tensor | None:
        """Returns the list of attention's splits for a window; None if the step has none.

        A step has no list if it has only prompts, or if all its requests are decoded and one split holds any context.
        When a window is first used, the launch that writes its list is appended to ``works``.
        """
        blocks = table.shape[1]
        splits = splits_of(blocks, cache.group.block_size)
        if not self._mixed and (not self._decodes or splits == 1):
            return None
        if window not in self._lists:  # for steps of all sizes, as one runs at a time
            size = work_size(self.limits.requests, splits_of(self.limits.blocks, cache.group.block_size))
            self._lists[window] = torch.empty(size, dtype=torch.int32, device=self.device)
        if window not in self._listed:
            self._listed.add(window)
            starts = self._inputs[Q_START] if self._mixed else None
            call = work_call(kv_len, self._lists[window], window, self.limits.requests, q_start=starts)
            works.append(self.launch(call))
        return self._lists[window]

    def launch(self, call: Call) -> Work:
        """Returns a function that launches the call; a function that does nothing if the grid is empty."""
        if math.prod(call.grid) == 0:
            return _nothing
        return self._launcher.bind(call)

    def resident(self, call: Call) -> int:
        """Returns the number of programs of the call's kernel that the whole GPU runs at a time."""
        return self.processors * self._launcher.resident(call)

    def tile(self, shape: AttentionShape, decode: bool) -> Tile:
        """Returns the tile of the attention kernel for a layer. ``decode``: True for decode steps."""
        return self._launcher.tile(shape, decode)

    @property
    def tokens(self) -> int:
        """The number of the step's tokens, with padding."""
        return self._sizes[0]

    @property
    def decodes(self) -> bool:
        """True if each request of the step has one token."""
        return self._decodes

    @property
    def mixed(self) -> bool:
        """True if only some requests of the step have one token; these are decoded."""
        return self._mixed


def _steps_by_row(program: LoweredProgram) -> list[int]:
    """Returns the indices of the program's steps by row: those that compute values for each sampled row, directly or
    from such values.
    """
    places, written = list[int](), set[str]()
    for index, step in enumerate(program.steps):
        of_rows = any(size.r for output in step.outputs for size in output.shape[:1])
        if of_rows or any(operand.name in written for operand in step.inputs):
            places.append(index)
            written.update(output.name for output in step.outputs)
    return places


def kept_for_rows(program: LoweredProgram) -> list[Operand]:
    """Returns the values of other steps that steps by row read."""
    by_row = [program.steps[index] for index in _steps_by_row(program)]
    written = {output.name for step in by_row for output in step.outputs}
    operands = dict.fromkeys(operand for step in by_row for operand in step.inputs)
    return [operand for operand in operands if operand.kind == "buffer" and operand.name not in written]


def _linked(step: Step) -> frozenset[str]:
    """Returns the names of the buffers that a send or receive step shares with another stage."""
    operands = {"send": step.outputs, "receive": step.inputs}.get(step.op, ())
    return frozenset(operand.name for operand in operands)


def _memory_of_regions(program: LoweredProgram, limits: StepLimits) -> tuple[dict[int, int], int]:
    """Assigns the regions of memory to one allocation: returns region -> its first byte, and the size of the
    allocation.

    Region 0 is the rank's own arena; the others are its copies of regions that ranks share on the cpu target.
    """
    sizes = limits.tokens, limits.requests, limits.rows
    linked = frozenset[str]().union(*map(_linked, program.steps))
    used = {buffer.region for buffer in program.buffers if buffer.name not in linked}
    begins, most = {0: 0}, program.arena_bytes.evaluate(*sizes)
    for region, size in program.regions:
        begins[region] = most
        most += size.evaluate(*sizes) if region in used else 0
    return begins, most


def room_bytes(program: LoweredProgram, limits: StepLimits, exact: bool) -> dict[Room, int]:
    """Returns kind of temporary memory (``Room``) -> the bytes that a program's ops need of it.

    Ops share the memory of a kind, so it has room for the op that needs most. Only "kept" holds several values at once.
    Kinds that no op needs are left out.

    Args:
        program: a program lowered for the cuda target.
        limits: the most tokens, requests and rows of a step.
        exact: True if a token's bits must not depend on the step that computes it. Then no weights are dequantized to
            temporary memory.
    """
    sizes = limits.tokens, limits.requests, limits.rows
    groups = {f"{group.name}/{layer}": group for group in program.cache_groups for layer in group.layers}
    rooms: dict[Room, int] = {}
    for step in program.steps:
        if step.op in EXCHANGED:
            needed: Mapping[Room, int] = exchanged_bytes(step, sizes)
        elif step.op == "linear":
            needed = {} if exact else unpacked_bytes(step, limits.tokens)
        elif step.op == "combine_experts":
            needed = {"places": 4 * step.inputs[1].shape[0].evaluate(*sizes)}
        elif step.op in ("kv_write", "paged_attention"):
            group = groups[next(o.name for o in step.inputs if o.kind == "cache")]
            written = step.op == "kv_write"
            needed = written_bytes(step, group, limits.tokens) if written else heads_bytes(step, group, sizes)
        else:
            continue
        for name, size in needed.items():
            rooms[name] = max(size, rooms.get(name, 0))
    for operand in kept_for_rows(program):
        count = math.prod(size.evaluate(*sizes) for size in operand.shape)
        rooms["kept"] = rooms.get("kept", 0) + -(-stored_bytes(operand.dtype, count) // 16) * 16
    return rooms


def lay_narrow(program: LoweredProgram, weights: dict[str, Tensor]) -> set[str]:
    """Replaces quantized weights and their scales in ``weights`` by the order that products read fastest
    (``laid_by_group``).

    Returns the names of all weights, scales and offsets that have this order.
    """
    uses = {use.name: use for use in program.weights}
    readers: dict[str, tuple[Step, int]] = {}
    otherwise = set[str]()
    for step in program.steps:
        for number, operand in enumerate(step.inputs):
            if operand.kind == "weight" and uses[operand.name].dtype in FORMS:
                whole = tuple(size.constant for size in operand.shape) == tuple(uses[operand.name].shape)
                if whole and number == STORED.get(step.op, (-1, ""))[0]:
                    readers[operand.name] = step, number
                else:
                    otherwise.add(operand.name)
    laid = set[str]()
    for name, (step, number) in readers.items():
        beside = [of.name for of in step.inputs[number + 1 : number + 2 + bool(step.attrs.get("has_offsets"))]]
        if name in otherwise or not all(of in weights for of in beside):
            continue
        before = len(uses[name].shape) < weights[name].dim()  # by another program with these weights
        if not before:
            group = int(step.attrs.get(STORED[step.op][1], 0))
            offsets = weights[beside[1]] if len(beside) > 1 else None
            form = FORMS[uses[name].dtype]
            weight = laid_by_group(Stored(weights[name], form, weights[beside[0]], offsets, group))
            if not weight.by_group:
                continue
            for of, tensor in zip((name, *beside), (weight.values, weight.scales, weight.offsets), strict=False):
                assert tensor is not None
                weights[of] = tensor
        laid.update((name, *beside))
    return laid


def scratch_floats(program: LoweredProgram, limits: StepLimits, exact: bool) -> int:
    """Returns the number of floats of scratch memory, for the splits of attention over the longest contexts, or for
    products.
    """
    uses = {use.name: use for use in program.weights}
    groups = {f"{group.name}/{layer}": group for group in program.cache_groups for layer in group.layers}
    needed = [0]
    for step in program.steps:
        if step.op == "paged_attention":
            group = groups[next(o.name for o in step.inputs if o.kind == "cache")]
            heads, size = attended_heads(step, group)[1], step.outputs[0].shape[2].constant
            block_size = group.block_size
            tokens = min(limits.tokens, limits.requests)
            needed.append(attention_scratch(tokens, heads, size, limits.blocks, block_size, mixed=True))
        elif step.op == "linear":
            form = FORMS.get(uses[step.inputs[1].name].dtype, "float")
            columns, depth = uses[step.inputs[1].name].shape
            dtype = FLOATS_OF[TORCH_DTYPES[step.inputs[0].dtype]]
            shared = int(step.attrs.get("weight_group", 0))
            tile = exact_tile(depth, form, shared, dtype) if exact else None
            needed.append(split_scratch(depth, columns, form, shared, dtype, tile))
    return max(needed)


def step_memory(program: LoweredProgram, limits: StepLimits, vocab: int, exact: bool = False) -> int:
    """Returns the bytes that steps need in addition to weights and caches: activations, attention, sampling, logits."""
    total = _memory_of_regions(program, limits)[1] + sum(room_bytes(program, limits, exact).values())
    total += 4 * scratch_floats(program, limits, exact)
    windows = {int(step.attrs["window"]): step for step in program.steps if step.op == "paged_attention"}
    smallest = min((group.block_size for group in program.cache_groups), default=1)
    total += len(windows) * 4 * work_size(limits.requests, splits_of(limits.blocks, smallest))

    total += 12 * len(program.cache_groups) * limits.requests * -(-limits.blocks // 4) * 4  # tables, and their changes
    total += 4 * max(limits.tokens - limits.rows, 0)  # drawn tokens for which sampling has no memory

    def new(shape: tuple[int, ...], dtype: str) -> DeviceArray:
        nonlocal total
        total += math.prod(shape) * np.dtype(dtype).itemsize
        return DeviceArray(0, np.dtype(dtype), shape)

    SamplingMemory(limits.rows, vocab, new)
    logits = 4 * limits.rows * vocab  # as float32: those that are changed, and those that are given back
    return total + 2 * logits + logits // 5  # the last: what their logprobs take


def weight_tensor(use: WeightUse, array: Any, device: torch.device) -> Tensor:
    """Copies a bundle's weight, a numpy array of any type and shape, to a device. Two 4-bit values stay in a byte."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to weights
        stored = torch.from_numpy(array.reshape(-1).view(np.uint8)).to(device)
    shape = (*use.shape[:-1], use.shape[-1] // 2) if use.dtype in ("i4", "u4") else use.shape
    return stored.view(TORCH_DTYPES[use.dtype]).view(shape)


def _new_pools(group: CacheGroup, blocks: int, device: torch.device) -> list[Tensor]:
    """Returns zeros for the caches of all layers of a group, [layers, P, ...] each: states; or keys, values unless they
    are in keys, and the scales of each if there are some.

    8-bit floats are bytes here, as are pairs of 4-bit codes. A layer's cache begins at a multiple of 16 bytes.
    """
    layers = len(group.layers)
    if group.kind == STATE:
        return [torch.zeros((layers, -(-blocks // 4) * 4, group.state_size), device=device)[:, :blocks]]
    dtype = _stored_type(group)
    stored = torch.uint8 if dtype.itemsize == 1 else dtype
    begin = layers, blocks, group.block_size
    planes = group.planes[:1] if group.values_in_keys else group.planes
    share = 2 if ROTATED_CODES.get(group.dtype) == "i4" else 1
    pools = [torch.zeros((*begin, of.heads, of.size // share), dtype=stored, device=device) for of in planes]
    if group.dtype in SCALED_CACHES or group.dtype in ROTATED_CODES:
        scales = torch.float32 if group.dtype in SCALED_CACHES else torch.float16
        pools += [torch.zeros((*begin, plane.heads), dtype=scales, device=device) for plane in planes]
    return pools


def _stored_type(group: CacheGroup) -> torch.dtype:
    """Returns the type of the elements, or of the bytes, of a cache of keys and values."""
    return TORCH_DTYPES[ROTATED_CODES.get(group.dtype, group.dtype)]


def _cache_of(group: CacheGroup, tensors: Sequence[Tensor]) -> Cache | States:
    """Returns a layer's cache, whose tensors are those of ``_new_pools``."""
    if group.kind == STATE:
        return States(group, tensors[0])
    dtype, stored = _stored_type(group), list(tensors)
    keys = stored.pop(0).view(dtype)
    values = keys[..., : group.value_head_size] if group.values_in_keys else stored.pop(0).view(dtype)
    key_scales, value_scales = (stored[0], stored[-1]) if stored else (None, None)
    return Cache(group, LayerCaches(keys, values, key_scales, value_scales, group.values_in_keys))


_MOST_COPIED = 32 << 20
"""The most bytes of blocks that are copied at a time, and need memory until they are written."""


def _nothing() -> None:
    """Does nothing: the work of a call with an empty grid."""
