"""A run of a bundle's target: the cpu program, observed step by step while the runtime's kernels compute it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from enginewright.passes.ops.quantized_cache import stored_heads
from enginewright.plugins.native.executable import CpuProgram
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import unpack
from enginewright.runtime.shared.contracts import KV_BLOCK_SIZE, FloatArray, Int32Array, StepInput
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.lowered_program import Affine, LoweredProgram, Operand, Step
from enginewright.runtime.shared.targets import MEASURED
from enginewright.runtime.shared.weight_formats import SCALED

from .probes import LINEARS, Call, Piece, Probe, epilogue_of, find_probes, owner_of, pieces_of
from .program_calls import Scaling
from .runs import Role, Stored, Tensor, cut, dequantized
from .values import Recording, Used, ValueName, Values, leaves_of, token_axis

_TOKENS, _ROWS = Affine(t=1), Affine(r=1)
_SEED = 0
"""The seed of the order in which KV blocks are dealt out."""


class BundleRun:
    """A target of a bundle.

    The sequences are run as they are served: a chunk of each, the rest but one token, and a decode step. So keys and
    values of the past are read from the cache.

    Args:
        bundle: open.
        target: a ready target that has a lowered program.
        isa: instruction set; None takes the best there is.
        leaves: as of ``ProgramRun``.
        scaling: what the passes of its recipe have done to the channels of values.

    Raises:
        BundleError: it has no such target, or the program doesn't hold together.
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
        self.probes = find_probes(self.calls, self.leaves, self.program.outputs["logits"].name)

    @property
    def value_names(self) -> Collection[ValueName]:
        """Names the values that the bundle's program can record."""
        return {probe.name for probe in self.probes}

    def values(self, sequences: Sequence[torch.Tensor], given: Values | None = None) -> Values:
        """The values of sequences [S]; see ``Recording`` for ``given``."""
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
        """The stored weights of the module at ``path``, as float32."""
        weights = [tensor for call in self.calls if path in call.where for tensor in self.tensors_of(call)]
        return [tensor for tensor in weights if tensor.path == path]

    def tensors_of(self, call: Call) -> list[Tensor]:
        """The stored weights of a step, as float32; those of a fused product are cut into each module's rows."""
        assert isinstance(call.key, int)
        return cut(call, _stored(self.bundle, self.program.steps[call.key]))

    def describe(self, call: Call) -> str:
        """Names a step in one line: its number, its op and its modules."""
        return f"step {call.key}: {call.op}" + (f" ({' + '.join(call.where)})" if call.where else "")


def _stored(bundle: Bundle, step: Step) -> list[Stored]:
    """Weights come in an order of their own: what is multiplied, its scales, its offsets, then a bias."""
    weights = [o for o in step.inputs if o.kind == "weight"]
    group = int(step.attrs.get("weight_group", step.attrs.get("group_size", 0)))
    stored: list[Stored] = []
    while weights:
        first, *weights = weights
        scales = [w for w in weights if w.dtype == "f16"] if first.dtype in SCALED else []
        weights = weights[len(scales) :]
        entry = bundle.tensor(first.name)

        def read(first: Operand = first, scales: Sequence[Operand] = scales) -> FloatArray:
            values, *factors = (_unpacked(bundle, o.name) for o in (first, *scales))
            if not factors:
                return values
            return dequantized(values, factors[0], factors[1] if len(factors) > 1 else None, group)

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
        """KV blocks of each cache group."""
        return {g.name: sum(-(-n // g.block_size) for n in self.lengths) for g in self.program.cache_groups}

    def _tables(self) -> dict[str, Int32Array]:
        """group -> [B, blocks], padded with -1; blocks are dealt out in a random order."""
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
        """Each step's tokens by their numbers in the whole run, and what goes into the program."""
        tables = self._tables()
        first = np.cumsum([0, *self.lengths])  # of each sequence, in the run
        ends = [sorted({0, -(-n // 2), n - 1, n} - {0}) for n in self.lengths]
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
                ),
            )


@dataclass
class _Sum:
    """An input of a step that adds: where it is, what it was, and what it was given instead."""

    place: npt.NDArray[Any]
    value: npt.NDArray[Any]
    other: npt.NDArray[Any]


class _Probes:
    """The probes of one step of the run, by step of the program and before or after."""

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
        """Notes which rows of a table a step takes."""
        if step.op not in ("embedding", "quantized_embedding"):
            return
        table = next(o for o in step.inputs if o.kind == "weight")
        at = next(i for i, o in enumerate(step.inputs) if o.kind != "weight")
        of_step = {"ids": self._given.ids, "positions": self._given.positions}
        ids = arrays[at] if step.inputs[at].kind == "buffer" else of_step.get(step.inputs[at].name)
        if ids is not None:
            self._recording.use(step.where, "rows", ids.reshape(-1), table.shape[0].constant)

    def _before_sum(self, index: int, arrays: Sequence[npt.NDArray[Any] | None]) -> None:
        """Makes a step that adds its first two inputs find the sum that is given."""
        for probe in [probe for probe in self._probes.get((index, False), ()) if probe.added]:
            first, second = arrays[:2]
            assert first is not None
            assert second is not None
            replacement = self._recording.instead(probe.name, first.size // len(self._tokens), self._tokens)
            if replacement is not None:
                self._own = _Sum(first, first.copy(), replacement.reshape(first.shape) - second)
                first[...] = self._own.other

    def _after_sum(self, probe: Probe, total: npt.NDArray[Any] | None) -> None:
        """Its own sum: what it would have been, and what the step does to a sum. The input is put back."""
        term, self._own = self._own, None
        assert term is not None
        assert total is not None
        rows = term.value + (total - term.other)
        self._recording.see(probe.name, rows.reshape(len(self._tokens), -1).astype(np.float32), self._tokens)
        if not np.may_share_memory(term.place, total):
            term.place[...] = term.value

    def _before_residual(self, index: int, arrays: Sequence[npt.NDArray[Any] | None]) -> None:
        """Makes a product add something of its own size, so that nothing is lost when that is taken off again.

        In a deep layer the residual is a hundred times what the product adds to it.
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
        """Keys are read from the cache, [P, Nkv, D, K], at the slots that were just written, and put back there."""
        (cache,) = [operand for operand in step.inputs if operand.kind == "cache"]
        group, _, layer = cache.name.rpartition("/")
        keys, _ = self._executable.cache_arrays(group, int(layer))
        slots = self._given.slots[group]
        blocks, places = np.divmod(slots, keys.shape[3])
        rows: FloatArray = keys[blocks, :, :, places]  # [T, Nkv, D], a copy
        replacement = self._recording.see(probe.name, rows.reshape(len(rows), -1), self._tokens)
        if replacement is not None:
            put_keys(self._executable, group, int(layer), slots, replacement.reshape(rows.shape))


def _axis(operand: Operand) -> int | None:
    """The axis of tokens. The sampled rows are all tokens, in order."""
    return token_axis([_TOKENS if size == _ROWS else size for size in operand.shape], _TOKENS)


def calls_of(program: LoweredProgram, bundle: Bundle) -> list[Call]:
    """The steps of a program. A value is a buffer: views of one are not distinguished."""
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
    """The part of its buffer that an operand covers: offset, rows, stride between rows, and elements of a row."""
    rows = [str(x) for x in (operand.offset, *operand.shape[:1], *operand.strides[:1])]
    return (*rows, math.prod(size.constant for size in operand.shape[1:]))


def _is_float(operand: Operand) -> bool:
    return operand.kind == "buffer" and operand.dtype == "f32"


def put_keys(executable: CpuProgram, group: str, layer: int, slots: Int32Array, keys: FloatArray) -> None:
    """Writes keys [T, Nkv, D] at slots [T] of a layer, rounded as its cache is where that has fewer bits than 32."""
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
    elements, scales = stored_heads(torch.from_numpy(np.ascontiguousarray(keys)), dtype)
    stored = elements.view(torch.uint8).numpy().view(f"u{elements.element_size()}")  # [T, Nkv, D]
    pieces.view(stored.dtype)[where] = stored
    if scales is not None:
        all_scales = pieces[..., KV_BLOCK_SIZE * size :].view(np.float32)  # [P, Nkv, K]
        all_scales[blocks[:, None], np.arange(heads), places[:, None]] = scales.numpy()
