"""A run of a Program: torch evaluates it, and nodes are found by the paths of the modules that they come from."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx.node import Node

from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache, decoded
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.ir.calls import Call, calls_of, op_name, value_key
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import WHERE, join_where
from enginewright.passes.ir.scaling import scaling_of
from enginewright.passes.ir.value_name import ValueName
from enginewright.passes.ops.cache import rounded_heads
from enginewright.runtime.shared.contracts import FloatArray

from .probes import Probe, find_probes
from .runs import Role, Stored, Tensor, cut, tensors_at
from .values import Recording, Used, Values, from_rows, in_layers, leaves_of, to_rows, token_axis


class ProgramRun:
    """A run of a program at some stage.

    Args:
        program: the program, which isn't changed.
        name: the name of the run, such as "after fuse_qkv".
        cache: the values of weights, which the stages of one model share.
        leaves: the paths of the modules without modules in them; None takes those that the program shows.
    """

    def __init__(
        self, program: Program, name: str, *, cache: WeightCache | None = None, leaves: frozenset[str] | None = None
    ) -> None:
        self.program = program
        self.name = name
        self.calls = calls_of(program)
        paths = (path for call in self.calls for path in call.where)
        self.leaves = leaves_of(paths) if leaves is None else leaves
        self.probes = find_probes(self.calls, self.leaves, value_key(program.logits))
        self.scaling = scaling_of(program, self.calls)
        self._fast = FastEvaluation(program, cache)
        self.used: Used = {}
        """The rows and experts that tokens of the last run have used; see ``values.not_covered``."""

    @property
    def value_names(self) -> Collection[ValueName]:
        """The names of the values that the program can record."""
        return {probe.name for probe in self.probes}

    def values(
        self,
        sequences: Sequence[torch.Tensor],
        given: Values | None = None,
        layers: Collection[int] | None = None,
    ) -> Values:
        """Returns the values of sequences of token ids [S], packed into one step.

        Args:
            sequences: the token ids.
            given: values to continue with; see ``Recording``.
            layers: the numbers of the layers whose values are returned; None for all. With layers, calls whose results
                are given aren't computed.
        """
        tokens = sum(len(s) for s in sequences)
        recording = Recording(tokens, given, self.scaling.scales, self.scaling.unknown)
        self.used = recording.used
        places = _Probes(self.program, self.probes, recording)
        needed = None if layers is None else places.needed(layers)
        weights = None if needed is None else {str(a.target) for node in needed for a in node.all_input_nodes}

        def read(name: str) -> torch.Tensor:
            return self._fast.read(name) if weights is None or name in weights else torch.empty(0, device="meta")

        def compute(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            if needed is not None and node not in needed:
                return places.whole(node)
            _note_use(recording, node, args, kwargs)
            values, named = places.before(node, args, kwargs)
            if node.target is torch.ops.ew.paged_attention.default and _cache_dtype(node) != "f32":
                values[0] = values[0].bfloat16().to(values[0].dtype)  # as every kernel does (docs/inside/numerics.md)
            first_term = places.before_sum(node, values)
            residual = places.before_residual(node, values, named)
            return places.after(node, values, self._fast.compute(node, values, named), first_term, residual)

        self.program.evaluate(packed_inputs(self.program, sequences), compute=compute, read=read)
        return recording.values

    def tensors(self, path: str) -> list[Tensor]:
        """Returns the weights of the module at ``path``, as float32."""
        return tensors_at(self, path)

    def tensors_of(self, call: Call) -> list[Tensor]:
        """Returns the weights of a node, as float32; a fused product's weight is divided into the rows of each
        module.
        """
        assert isinstance(call.key, Node)
        return cut(call, _stored(self.program, call.key))

    def describe(self, call: Call) -> str:
        """Returns a line about a node: its name, its op and its modules."""
        assert isinstance(call.key, Node)
        return f"node {call.key.name}: {call.op}" + (f" ({join_where(call.where)})" if call.where else "")


def _stored(program: Program, node: Node) -> list[Stored]:
    arguments = bound_arguments(node)
    names = {name: str(value.target) for name, value in arguments.items() if program.weight_of(value) is not None}
    group = int(arguments.get("weight_group", arguments.get("group_size", 0)) or 0)

    weights: list[Stored] = []
    for role, (values, scales, offsets) in _TENSORS:
        if values not in names:
            continue

        def read(
            stored: Sequence[str] = [names[one] for one in (values, scales, offsets) if one in names],
        ) -> FloatArray:
            first, *factors = (program.weights[name].evaluate() for name in stored)
            rows: FloatArray = (decoded(first, *factors, group=group) if factors else first.float()).numpy()
            return rows

        parts = tuple((p.source, p.start, p.stop, p.size) for p in program.weights[names[values]].parts(0))
        weights.append(Stored(role, names[values], parts, read))
    return weights


_TENSORS: tuple[tuple[Role, tuple[str, str, str]], ...] = (
    ("weight", ("weight", "weight_scales", "weight_offsets")),
    ("weight", ("table", "scales", "offsets")),
    ("weight", ("inv_freq", "", "")),
    ("weight", ("gate_up", "", "")),
    ("weight", ("down", "", "")),
    ("bias", ("bias", "", "")),
)
"""Role of a weight -> the arguments of ops with its values, and with the scales and offsets that these may have."""


class _Probes:
    """The probes of a run, by node."""

    def __init__(self, program: Program, probes: Sequence[Probe], recording: Recording) -> None:
        self._program = program
        self._recording = recording
        self._probes: dict[tuple[Hashable, bool], list[Probe]] = defaultdict(list)
        self._replaced: dict[Node, torch.Tensor] = {}  # values that their other readers continue with too
        for probe in probes:
            self._probes[probe.key, probe.before].append(probe)

    def needed(self, layers: Collection[int]) -> set[Node]:
        """Returns the calls that must run to compute the compared values of ``layers``.

        Other calls whose results are given aren't among them.
        """
        observed = {
            probe.key for probes in self._probes.values() for probe in probes if in_layers(probe.name.path, layers)
        }
        needed_nodes: set[Node] = set()
        waiting = list(observed)
        while waiting:
            node = waiting.pop()
            assert isinstance(node, Node)
            if node in needed_nodes:
                continue
            needed_nodes.add(node)
            waiting += [n for n in node.all_input_nodes if n in observed or self.whole(n) is None]
        return needed_nodes

    def whole(self, node: Node) -> torch.Tensor | None:
        """Returns the result of a call if given values are all of it; None otherwise."""
        fake = node.meta["val"]
        if node.op != "call_function" or not isinstance(fake, torch.Tensor):
            return None
        axis = _axis(self._program, fake)
        if axis is None or any(not isinstance(n, int) for i, n in enumerate(fake.shape) if i != axis):
            return None
        shape = [self._recording.tokens if i == axis else int(n) for i, n in enumerate(fake.shape)]
        rows = self._given_rows(node, math.prod(shape) // self._recording.tokens)
        return None if rows is None else from_rows(rows, torch.empty(shape, dtype=fake.dtype), axis)

    def _given_rows(self, node: Node, width: int) -> FloatArray | None:
        """Returns a result [T, ``width``] put together from given values; None if these don't cover all its columns."""
        pieces: list[tuple[int, FloatArray]] = []
        for probe in self._probes.get((node, False), ()):
            if probe.residual or probe.added or probe.cached:
                continue
            first, last = probe.columns or (0, width)
            replacement = self._recording.instead(probe.name, last - first)
            if replacement is not None:
                pieces.append((first, replacement))
        pieces.sort(key=lambda piece: piece[0])
        ends = [0, *(first + replacement.shape[1] for first, replacement in pieces)]
        if not pieces or [first for first, _ in pieces] != ends[:-1] or ends[-1] != width:
            return None
        return np.concatenate([replacement for _, replacement in pieces], axis=1)

    def before(self, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments of a call, with given values in the place of its own, by position and by name."""

        def current(argument: Any, value: Any) -> Any:
            return self._replaced.get(argument, value) if isinstance(argument, Node) else value

        values = [current(a, v) for a, v in zip(node.args, args, strict=True)]
        for probe in self._probes.get((node, True), ()):
            source = node.args[probe.slot]
            assert isinstance(source, Node)
            replacement = self._see(probe, values[probe.slot], source.meta["val"])
            if replacement is not None:
                values[probe.slot] = self._replaced[source] = replacement
        return values, {key: current(node.kwargs[key], value) for key, value in kwargs.items()}

    def before_sum(self, node: Node, values: list[Any]) -> torch.Tensor | None:
        """Changes the first argument of a call that adds its first two, so that the sum is the given one; returns the
        original.
        """
        for probe in self._probes.get((node, False), ()):
            axis = _axis(self._program, node.meta["val"][probe.slot]) if probe.added else None
            if axis is not None:
                first, second = values[:2]
                replacement = self._recording.instead(probe.name, first.numel() // first.shape[axis])
                if replacement is not None:
                    values[0] = from_rows(replacement, first, axis) - second
                    return first  # type: ignore[no-any-return]
        return None

    def before_residual(
        self, node: Node, values: list[Any], named: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Replaces the residual that a product adds by values of the product's own size, so that subtracting it loses
        no bits. Returns the original residual and the replacement.
        """
        for probe in self._probes.get((node, False), ()):
            axis = _axis(self._program, node.meta["val"]) if probe.residual else None
            if axis is not None:
                position = list(bound_arguments(node)).index("residual")
                residual = named["residual"] if "residual" in named else values[position]
                replacement = self._recording.instead(probe.name, residual.numel() // residual.shape[axis])
                other = torch.zeros_like(residual) if replacement is None else from_rows(replacement, residual, axis)
                if "residual" in named:
                    named["residual"] = other
                else:
                    values[position] = other
                return residual, other
        return None

    def after(
        self,
        node: Node,
        args: Sequence[Any],
        result: Any,
        own: torch.Tensor | None,
        residual: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> Any:
        """Returns the result of a call with which the program continues; see ``before_sum`` and ``before_residual``."""
        for probe in self._probes.get((node, False), ()):
            if probe.residual:
                if residual is not None:
                    real, added = residual
                    product = result - added
                    replacement = self._see(probe, product, node.meta["val"])
                    result = (product if replacement is None else replacement) + real
                continue
            if probe.added and own is not None:
                # Its own sum: what it would have been, and what the call does to a sum.
                axis = _axis(self._program, node.meta["val"][probe.slot])
                assert axis is not None
                self._recording.see(probe.name, to_rows(own + (result[probe.slot] - args[0]), axis))
                continue
            if probe.cached:
                result = self._after_write(probe, node, args, result)
                continue
            several = isinstance(result, (tuple, list))
            value = result[probe.slot] if several else result
            fake = node.meta["val"][probe.slot] if several else node.meta["val"]
            replacement = self._see(probe, value, fake)
            if replacement is not None:
                result = (*result[: probe.slot], replacement, *result[probe.slot + 1 :]) if several else replacement
        return result

    def _after_write(self, probe: Probe, node: Node, args: Sequence[Any], result: Sequence[torch.Tensor]) -> Any:
        """Records the keys of the slots [T] that a call has written to the cache of keys [P, K, Nkv, D], the second of
        its results. Of two caches, it reads the second, which has more bits. Given keys are rounded as the caches round
        them: an unfused program rounds given keys when it writes them.
        """
        bound, results = bound_arguments(node), list(result)
        names = ("", "ends_") if "ends_slots" in bound else ("",)
        slots = [args[list(bound).index(f"{name}slots")].long() for name in names]
        keys = results[2 * len(names) - 1].flatten(0, 1)[slots[-1]]
        replacement = self._recording.see(probe.name, to_rows(keys, 0))
        if replacement is None:
            return result
        new_keys = from_rows(replacement, keys, 0)
        for place, name, written in zip((1, 3), names, slots, strict=False):
            rounded = rounded_heads(new_keys, bound[f"{name}dtype"], 0)
            results[place] = results[place].flatten(0, 1).index_put((written,), rounded).view_as(results[place])
        return tuple(results)

    def _see(self, probe: Probe, value: torch.Tensor, fake: torch.Tensor) -> torch.Tensor | None:
        axis = _axis(self._program, fake)
        if axis is None:
            return None
        if probe.columns is None:
            replacement = self._recording.see(probe.name, to_rows(value, axis))
            return None if replacement is None else from_rows(replacement, value, axis)
        start, stop = probe.columns
        part = value[..., start:stop]
        replacement = self._recording.see(probe.name, to_rows(part, axis))
        if replacement is None:
            return None
        return torch.cat([value[..., :start], from_rows(replacement, part, axis), value[..., stop:]], -1)


_IDS: Mapping[str, tuple[str, str]] = {
    "embedding": ("ids", "table"),
    "quantized_embedding": ("ids", "table"),
    "aten.embedding": ("indices", "weight"),
}
"""Op that looks up rows -> its arguments with the indices of rows, and with the table."""


def _note_use(recording: Recording, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Records in ``recording`` which rows of a table, or which experts, a call uses."""
    op, where = op_name(node), node.meta.get(WHERE, ())
    if not where or op not in (*_IDS, "moe", "route_experts"):
        return
    arguments = dict(zip(bound_arguments(node), args, strict=False)) | dict(kwargs)
    if op in _IDS:
        ids, table = (arguments[name] for name in _IDS[op])
        recording.use(where[0], "rows", ids.numpy().reshape(-1), table.shape[0])
    else:
        count = arguments["experts"] if op == "route_experts" else arguments["gate_up"].shape[0]
        recording.use(where[0], "experts", arguments["expert_ids"].numpy().reshape(-1), count)


def _cache_dtype(attention: Node) -> str:
    """Returns the storage type of the key cache that an attention reads, taken from the last op that wrote it."""
    node = bound_arguments(attention)["k_cache"]
    while isinstance(node, Node) and node.target is operator.getitem:
        node = node.args[0]
    return str(bound_arguments(node).get("dtype", "f32")) if isinstance(node, Node) else "f32"


def _axis(program: Program, fake: torch.Tensor) -> int | None:
    """Returns the axis of tokens. The sampled rows are all tokens, in order."""
    sizes = [str(program.expression(size)) for size in fake.shape]
    return token_axis(["T" if size == "R" else size for size in sizes], "T")
