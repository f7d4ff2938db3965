"""A run of a bundle's cpu program, whose steps are observed one by one while the runtime's kernels compute them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from enginewright.passes.framework.fast_evaluation import decoded
from enginewright.passes.ir.calls import LINEARS, Call, Piece, epilogue_of, owner_of, pieces_of
from enginewright.passes.ir.scaling import Scaling
from enginewright.passes.ir.value_name import ValueName
from enginewright.passes.ops.quantized_cache import FEW_BITS, NORMAL, quantize_to_few_bits, stored_heads
from enginewright.plugins.native.executable import CpuProgram
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import unpack
from enginewright.runtime.shared.contracts import KV_BLOCK_SIZE, FloatArray, Int32Array, StepInput
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.lowered_program import Affine, LoweredProgram, Operand, Step
from enginewright.runtime.shared.step_schema import CLASSES, LOGITS, POOLED, TYPES
from enginewright.runtime.shared.targets import MEASURED
from enginewright.runtime.shared.weight_formats import SCALED

from .probes import Probe, find_probes
from .runs import Role, Stored, Tensor, cut, tensors_at
from .values import Recording, Used, Values, leaves_of, token_axis

_TOKENS, _ROWS = Affine(t=1), Affine(r=1)
_SEED = 0
"""The seed of the order in which KV blocks are assigned."""


class BundleRun:
    """A run of one target of a bundle.

    Sequences are run in the way in which they are served: a chunk of each, the rest without the last token, then a
    decode step. So keys and values of earlier tokens are read from the cache. A program without caches computes all
    sequences in one step.

    Args:
        bundle: an open bundle.
        name: the name of the run, for messages.
        target: a target that is ready and has a lowered program.
        isa: the instruction set; None takes the best one of this machine.
        leaves: the paths of the modules without modules in them; None takes those that the program shows.
        scaling: the changes that the recipe's passes made to the channels of values; None without any.

    Raises:
        BundleError: the bundle has no such target, or the program is inconsistent.
    """

    def __init__(
        self,
        bundle: Bundle,
        name: str,
        *,
        target: str = MEASURED,
        isa: str | None = None,
        leaves: frozenset[str] | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        self.scaling = scaling or Scaling()
        self.used: Used = {}
        """The rows and experts that tokens of the last run have used; see ``values.not_covered``."""
        self.bundle = bundle
        self.name = name
        self.program = bundle.program(target)
        self.isa = isa
        self.calls = calls_of(self.program, bundle)
        paths = (path for call in self.calls for path in call.where)
        self.leaves = leaves_of(paths) if leaves is None else leaves
        self.probes = find_probes(self.calls, self.leaves, self.program.outputs[_result(self.program)].name)

    @property
    def value_names(self) -> Collection[ValueName]:
        """The names of the values that the bundle's program can record."""
        return {probe.name for probe in self.probes}

    def values(self, sequences: Sequence[torch.Tensor], given: Values | None = None) -> Values:
        """Returns the values of sequences of token ids, [S] each. ``given`` are values to continue with; see
        ``Recording``.
        """
        lengths = [len(s) for s in sequences]
        recording = Recording(sum(lengths), given, self.scaling.scales, self.scaling.unknown)
        self.used = recording.used
        plan = _Plan(lengths, self.program)
        weights = {use.name: self.bundle.weight(use.name) for use in self.program.weights}
        executable = CpuProgram(self.program, weights, blocks=plan.blocks, isa=self.isa)
        self.isa = executable.isa
        ids = np.concatenate([s.numpy().astype(np.int32) for s in sequences])
        for tokens, step in plan.steps(ids):
            watcher = _Probes(executable, self.probes, recording, tokens, step)
            executable.watch(step, watcher.watch)
        return recording.values

    def tensors(self, path: str) -> list[Tensor]:
        """Returns the stored weights of the module at ``path``, as float32."""
        return tensors_at(self, path)

    def tensors_of(self, call: Call) -> list[Tensor]:
        """Returns the stored weights of a step, as float32; a fused product's weight is divided into the rows of each
        module.
        """
        assert isinstance(call.key, int)
        return cut(call, _stored(self.bundle, self.program.steps[call.key]))

    def describe(self, call: Call) -> str:
        """Names a step in one line: its number, its op and its modules."""
        return f"step {call.key}: {call.op}" + (f" ({' + '.join(call.where)})" if call.where else "")


def _stored(bundle: Bundle, step: Step) -> list[Stored]:
    """Returns the weights of a step. A step reads the values of a weight, then its scales and offsets, then a bias."""
    weights = [o for o in step.inputs if o.kind == "weight"]
    group = int(step.attrs.get("weight_group", step.attrs.get("group_size", 0)))
    stored: list[Stored] = []
    while weights:
        first, *weights = weights
        scales = [w for w in weights if w.dtype == "f16"] if first.dtype in SCALED else []
        weights = weights[len(scales) :]
        entry = bundle.tensor(first.name)

        def read(first: Operand = first, scales: Sequence[Operand] = scales) -> FloatArray:
            values, *factors = (torch.from_numpy(_unpacked(bundle, o.name)) for o in (first, *scales))
            rows: FloatArray = (decoded(values, *factors, group=group) if factors else values).numpy()
            return rows

        role: Role = "bias" if stored else "weight"
        parts = tuple((p.source, *p.rows, p.size) for p in entry.parts)
        stored.append(Stored(role, first.name, parts, read))
    return stored


def _unpacked(bundle: Bundle, name: str) -> FloatArray:
    entry = bundle.tensor(name)
    value: FloatArray = unpack(bundle.weight(name), entry.shape, entry.layout, entry.dtype).astype(np.float32)
    return value


@dataclass(frozen=True)
class _Plan:
    """The plan of a run: the lengths of its sequences, and the cache blocks of their keys and values."""

    lengths: Sequence[int]
    program: LoweredProgram

    @property
    def blocks(self) -> dict[str, int]:
        """The number of KV blocks of each cache group."""
        return {g.name: sum(-(-n // g.block_size) for n in self.lengths) for g in self.program.cache_groups}

    def _tables(self) -> dict[str, Int32Array]:
        """Returns the block table of each cache group, [B, blocks] padded with -1; blocks are assigned in a random
        order.
        """
        tables = {}
        generator = np.random.default_rng(_SEED)
        for group in self.program.cache_groups:
            counts = [-(-n // group.block_size) for n in self.lengths]
            order = generator.permutation(sum(counts)).astype(np.int32)
            table = np.full((len(counts), max(counts)), -1, np.int32)
            for row, blocks in zip(table, np.split(order, np.cumsum(counts)[:-1]), strict=True):
                row[: len(blocks)] = blocks
            tables[group.name] = table
        return tables

    def steps(self, ids: Int32Array) -> Iterator[tuple[npt.NDArray[np.int64], StepInput]]:
        """Yields the tokens of each step, as their numbers in the run, and the input of the program. ``ids`` are all
        tokens.
        """
        tables = self._tables()
        first = np.cumsum([0, *self.lengths])  # of each sequence, in the run
        whole = not self.program.cache_groups
        ends = [[n] if whole else sorted({0, -(-n // 2), n - 1, n} - {0}) for n in self.lengths]
        types = any(o.name == TYPES for step in self.program.steps for o in step.inputs if o.kind == "input")
        for number in range(max(len(e) for e in ends)):
            bounds = [[0, *e][number : number + 2] for e in ends]
            active = [b for b, bound in enumerate(bounds) if len(bound) == 2]
            chunks = [np.arange(*bounds[b]) for b in active]
            tokens = np.concatenate([first[b] + chunk for b, chunk in zip(active, chunks, strict=True)])
            yield (
                tokens,
                StepInput.packed(
                    ids=ids[tokens],
                    counts=[len(c) for c in chunks],
                    kv_len=[bounds[b][1] for b in active],
                    tables={name: np.ascontiguousarray(table[active]) for name, table in tables.items()},
                    groups=self.program.cache_groups,
                    rows=np.arange(len(tokens)),
                    more={TYPES: np.zeros(len(tokens), np.int32)} if types else None,
                    outputs=(_result(self.program),),
                ),
            )


def _result(program: LoweredProgram) -> str:
    """Returns the name of a program's result."""
    return next(name for name in (LOGITS, POOLED, CLASSES) if name in program.outputs)


@dataclass
class _Sum:
    """A step that adds two values, and one of its inputs, which is replaced for that step.

    Attributes:
        place: the array of the input.
        value: a copy of its original values.
        other: the values that replace them.
    """

    place: npt.NDArray[Any]
    value: npt.NDArray[Any]
    other: npt.NDArray[Any]


class _Probes:
    """The probes of one step of the run. The key is (step of the program, True for probes before it)."""

    def __init__(
        self,
        executable: CpuProgram,
        probes: Sequence[Probe],
        recording: Recording,
        tokens: npt.NDArray[np.int64],
        given: StepInput,
    ) -> None:
        self._executable = executable
        self._program = executable.lowered
        self._given = given
        self._own: _Sum | None = None
        self._residual: _Sum | None = None
        self._recording = recording
        self._tokens = tokens
        self._probes: dict[tuple[Hashable, bool], list[Probe]] = defaultdict(list)
        for probe in probes:
            self._probes[probe.key, probe.before].append(probe)

    def watch(self, index: int, before: bool, arrays: Sequence[npt.NDArray[Any] | None]) -> None:
        step = self._program.steps[index]
        if before:
            self._before_sum(index, arrays)
            self._before_residual(index, arrays)
            self._note_rows(step, arrays)
        elif step.op == "route_experts":
            starts = arrays[-1]
            assert starts is not None
            self._recording.use(step.where, "experts", np.flatnonzero(np.diff(starts)), len(starts) - 1)
        for probe in self._probes.get((index, before), ()):
            if probe.residual:
                self._after_residual(probe, arrays[probe.slot])
                continue
            if probe.cached:
                self._after_write(probe, step)
                continue
            if probe.added and self._own is not None:
                self._after_sum(probe, arrays[probe.slot])
                continue
            operand = (step.inputs if before else step.outputs)[probe.slot]
            array = arrays[probe.slot]
            axis = _axis(operand)
            if array is None or axis is None:
                continue
            if probe.columns is not None:
                array = array[..., slice(*probe.columns)]
            moved = np.moveaxis(array, axis, 0)  # a view of the arena
            rows: FloatArray = moved.reshape(len(self._tokens), -1).astype(np.float32)
            replacement = self._recording.see(probe.name, rows, self._tokens)
            if replacement is not None:
                moved[...] = replacement.reshape(moved.shape)

    def _note_rows(self, step: Step, arrays: Sequence[npt.NDArray[Any] | None]) -> None:
        """Records in ``used`` which rows of a table, or which experts, a step uses."""
        if step.op not in ("embedding", "quantized_embedding"):
            return
        table = next(o for o in step.inputs if o.kind == "weight")
        at = next(i for i, o in enumerate(step.inputs) if o.kind != "weight")
        of_step = {"ids": self._given.ids, "positions": self._given.positions}
        ids = arrays[at] if step.inputs[at].kind == "buffer" else of_step.get(step.inputs[at].name)
        if ids is not None:
            self._recording.use(step.where, "rows", ids.reshape(-1), table.shape[0].constant)

    def _before_sum(self, index: int, arrays: Sequence[npt.NDArray[Any] | None]) -> None:
        """Changes the first input of a step that adds its first two inputs, so that their sum is the given one."""
        for probe in [probe for probe in self._probes.get((index, False), ()) if probe.added]:
            first, second = arrays[:2]
            assert first is not None
            assert second is not None
            replacement = self._recording.instead(probe.name, first.size // len(self._tokens), self._tokens)
            if replacement is not None:
                self._own = _Sum(first, first.copy(), replacement.reshape(first.shape) - second)
                first[...] = self._own.other

    def _after_sum(self, probe: Probe, total: npt.NDArray[Any] | None) -> None:
        """Records the sum that the step would have computed from its original inputs, and restores the first input."""
        term, self._own = self._own, None
        assert term is not None
        assert total is not None
        rows = term.value + (total - term.other)
        self._recording.see(probe.name, rows.reshape(len(self._tokens), -1).astype(np.float32), self._tokens)
        if not np.may_share_memory(term.place, total):
            term.place[...] = term.value

    def _before_residual(self, index: int, arrays: Sequence[npt.NDArray[Any] | None]) -> None:
        """Replaces the residual that a product adds by values of the product's own size.

        In a deep layer a residual is a hundred times as large as the product, so subtracting it from the sum would lose
        bits.
        """
        for probe in [probe for probe in self._probes.get((index, False), ()) if probe.residual]:
            *others, residual = arrays
            assert residual is not None
            replacement = self._recording.instead(probe.name, residual.size // len(self._tokens), self._tokens)
            other = np.zeros_like(residual) if replacement is None else replacement.reshape(residual.shape)
            value = residual.copy()
            if any(array is not None and np.may_share_memory(array, residual) for array in others):
                other = value  # it is a factor of the product as well
            residual[...] = other
            self._residual = _Sum(residual, value, other)

    def _after_residual(self, probe: Probe, total: npt.NDArray[Any] | None) -> None:
        """Records the product alone, then adds the real residual to it, or to the value that replaces it."""
        residual, self._residual = self._residual, None
        assert residual is not None
        assert total is not None
        rows: FloatArray = (total - residual.other).reshape(len(self._tokens), -1).astype(np.float32)
        replacement = self._recording.see(probe.name, rows, self._tokens)
        total[...] = (rows if replacement is None else replacement).reshape(total.shape) + residual.value
        if not np.may_share_memory(residual.place, total):
            residual.place[...] = residual.value

    def _after_write(self, probe: Probe, step: Step) -> None:
        """Records the keys that a step has written to the cache [P, Nkv, D, K], and writes given keys in their
        place. Of two caches, it reads the second, which has more bits.
        """
        caches = [operand.name.rpartition("/") for operand in step.inputs if operand.kind == "cache"]
        group, _, layer = caches[-1]
        keys, _ = self._executable.cache_arrays(group, int(layer))
        blocks, places = np.divmod(self._given.slots[group], keys.shape[3])
        rows: FloatArray = keys[blocks, :, :, places]  # [T, Nkv, D], a copy
        replacement = self._recording.see(probe.name, rows.reshape(len(rows), -1), self._tokens)
        if replacement is None:
            return
        for group, _, layer in caches:
            put_keys(self._executable, group, int(layer), self._given.slots[group], replacement.reshape(rows.shape))


def _axis(operand: Operand) -> int | None:
    """Returns the axis of tokens of an operand; None if it has none.

    The sampled rows count as tokens: they are all of them.
    """
    return token_axis([_TOKENS if size == _ROWS else size for size in operand.shape], _TOKENS)


def calls_of(program: LoweredProgram, bundle: Bundle) -> list[Call]:
    """Returns the steps of a program as calls. A value is a buffer; views of one buffer count as one value."""
    return [_call(index, step, bundle) for index, step in enumerate(program.steps)]


def _call(index: int, step: Step, bundle: Bundle) -> Call:
    where = tuple(step.where.split(" + ")) if step.where else ()
    reads = tuple((i, o.name) for i, o in enumerate(step.inputs) if _is_float(o))
    writes = tuple((i, o.name) for i, o in enumerate(step.outputs) if _is_float(o))
    pieces: tuple[Piece, ...] = ()
    if step.op in LINEARS:
        weight = next((o.name for o in step.inputs if o.kind == "weight"), None)
        if weight is None:
            raise BundleError(f"{bundle.path}: step {index} {step.op} has no weight", hint="Export the bundle again.")
        parts = [(p.source, p.size) for p in bundle.tensor(weight).parts]
        pieces = pieces_of(where, weight, parts)
    epilogue = epilogue_of(bool(step.attrs.get("activation")), bool(step.attrs.get("has_residual")))
    first = next((o.name for o in step.inputs if o.kind == "weight"), "")
    views = {("read", i): _view(o) for i, o in enumerate(step.inputs)}
    views |= {("write", i): _view(o) for i, o in enumerate(step.outputs)}
    return Call(index, step.op, where, reads, writes, pieces, epilogue, owner_of(where, first) or "", views)


def _view(operand: Operand) -> Hashable:
    """Returns the part of a buffer that an operand covers: offset, rows, stride between rows, and elements of a row."""
    rows = [str(x) for x in (operand.offset, *operand.shape[:1], *operand.strides[:1])]
    return (*rows, math.prod(size.constant for size in operand.shape[1:]))


def _is_float(operand: Operand) -> bool:
    return operand.kind == "buffer" and operand.dtype == "f32"


def put_keys(executable: CpuProgram, group: str, layer: int, slots: Int32Array, keys: FloatArray) -> None:
    """Writes keys to the cache of a layer, rounded to the cache's format.

    Args:
        executable: the program with the cache.
        group: the name of the cache group.
        layer: the layer's number within the group.
        slots: [T], the slots to write to.
        keys: [T, Nkv, D].
    """
    blocks, places = np.divmod(slots, KV_BLOCK_SIZE)
    (dtype,) = (g.dtype for g in executable.lowered.cache_groups if g.name == group)
    if dtype == "f32":
        executable.cache_arrays(group, layer)[0][blocks, :, :, places] = keys
        return
    pieces, _ = executable.cache_memory(group, layer)  # [P, Nkv, bytes]: [D/2][K][2], then scales [K]
    heads, size = keys.shape[1:]
    channel = np.arange(size)
    pair = channel // 2 * 2 * KV_BLOCK_SIZE
    alone = (channel == size - 1) & (size % 2 == 1)  # of an odd D the last row is [K]
    at = pair + np.where(alone, places[:, None], places[:, None] * 2 + channel % 2)  # [T, D]
    where = (blocks[:, None, None], np.arange(heads)[:, None], at[:, None])
    if dtype in FEW_BITS:
        _put_few_bits(pieces, keys, FEW_BITS[dtype][0], (blocks, places), at)
        return
    elements, scales = stored_heads(torch.from_numpy(np.ascontiguousarray(keys)), dtype)
    stored = elements.view(torch.uint8).numpy().view(f"u{elements.element_size()}")  # [T, Nkv, D]
    pieces.view(stored.dtype)[where] = stored
    if scales is not None:
        all_scales = pieces[..., KV_BLOCK_SIZE * size :].view(np.float32)  # [P, Nkv, K]
        all_scales[blocks[:, None], np.arange(heads), places[:, None]] = scales.numpy()


def _put_few_bits(
    pieces: npt.NDArray[np.uint8],
    keys: FloatArray,
    bits: int,
    slots: tuple[Int32Array, Int32Array],
    at: npt.NDArray[np.signedinteger[Any]],
) -> None:
    """Writes keys to the cache in a format of rotated integers (few_bits.h).

    Args:
        pieces: [P, Nkv, bytes], the bytes of a layer's keys.
        keys: [T, Nkv, D].
        bits: the bits of an element.
        slots: the block of each token and its index in the block, [T] each.
        at: [T, D], the indices of elements among the bytes of a token and head.
    """
    integers, scales = quantize_to_few_bits(torch.from_numpy(np.ascontiguousarray(keys)), bits)
    heads, size = keys.shape[1:]
    planes, begin = [(integers.numpy().view(np.uint8).astype(np.int32), 8)], 0
    if bits == 4:
        planes = [(np.searchsorted(NORMAL, integers.numpy()).astype(np.int32), 4)]
    elif bits < 8:
        codes = (integers.numpy().astype(np.int32) + 2**bits - 1) // 2
        planes = [(codes & 15, 4), (codes >> 4, bits - 4)]
    for values, width in planes:
        part = size * width // 8  # bytes of a token
        shared = values.reshape(len(keys), heads, -1, part) << (width * np.arange(8 // width))[:, None]
        where = slots[0][:, None, None], np.arange(heads)[:, None], begin + at[:, None, :part]
        pieces[where] = shared.sum(2)
        begin += KV_BLOCK_SIZE * part
    all_scales = pieces[..., begin:].view(np.float16)  # [P, Nkv, K]
    all_scales[slots[0][:, None], np.arange(heads), slots[1][:, None]] = scales.numpy()
