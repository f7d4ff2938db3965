"""Probes: the places among a program's calls where values are observed, in a Program's nodes or a bundle's steps.

The rules are the same for both. A module without modules in it (a leaf) is a group of calls that have its path: what
they read from elsewhere is its input, what others read of them its output, if each is one value. Calls that stand for
several modules (fusions) are known by their ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

from .values import LOGITS, ValueName, What

LINEARS = frozenset({"linear", "quantized_linear"})
"""Products with a weight whose rows are those of one or several linears of the model."""
NORMS = frozenset({"rms_norm", "layer_norm"})
ADDED_NORMS = frozenset({"add_rms_norm", "add_layer_norm"})
"""Results: the norm, and the sum that it is of."""
_SUM_OF_QUANTIZED = 3
"""The sum among the results of an added norm that is quantized: behind values, scales and their sums."""
_CASTS = frozenset({"quantize_activation", "cast_bf16"})
_ATTENTION: Mapping[str, tuple[tuple[int, What], ...]] = {
    "attention": ((0, "query"), (1, "key"), (2, "value")),
    "paged_attention": ((0, "query"),),
}
Epilogue = Literal["", "activation", "residual", "both"]


@dataclass(frozen=True)
class Piece:
    """Rows ``start:stop`` of a product's weight, so columns of its result: those of the linear at ``path``."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Call:
    """A node or a step.

    Attributes:
        key: the node, or the step's index.
        op: its name, such as "linear", "add_rms_norm", or that of another library's op.
        where: module paths.
        reads: what it reads of other calls' float results, by the number of the argument (-1: within a list); any
            hashable names a value.
        writes: its float results, by their numbers.
        pieces: of a product of LINEARS.
        epilogue: what such a product does to its sums before it writes them.
        owner: of a norm: the module that its weight is of; "" if it has none.
        views: ("read", argument) or ("write", result) -> what of a value that is, where values are not always whole.
    """

    key: Hashable
    op: str
    where: tuple[str, ...]
    reads: tuple[tuple[int, Hashable], ...]
    writes: tuple[tuple[int, Hashable], ...]
    pieces: tuple[Piece, ...] = ()
    epilogue: Epilogue = ""
    owner: str = ""
    views: Mapping[tuple[str, int], Hashable] = field(default_factory=dict)


@dataclass(frozen=True)
class Probe:
    """A place where a value is observed: an argument or result of a call, or some columns of it.

    Attributes:
        before: True for argument number ``slot`` of the call ``key``, False for its result.
        columns: first and last column; None: all.
        cached: the value is what the call has written to the key cache for its tokens.
        added: the value is result ``slot``, the sum of the first two arguments, which the call itself continues with.
            To continue with another sum, an argument has to be replaced.
        residual: the value is the result without the residual that the call adds to it.
    """

    name: ValueName
    key: Hashable
    before: bool
    slot: int
    columns: tuple[int, int] | None = None
    cached: bool = False
    added: bool = False
    residual: bool = False


def find_probes(calls: Sequence[Call], leaves: frozenset[str], logits: Hashable) -> list[Probe]:
    """The probes of a program, in the order of execution; ``logits`` names its result.

    A value that would be in two places is left out.
    """
    probes: list[Probe] = []
    groups = _groups(calls, leaves)
    for path, group in groups.items():
        probes += _of_leaf(path, group, calls, logits)
    known = {probe.name for probe in probes}
    for call in calls:
        probes += [probe for probe in _of_call(call, leaves) if probe.name not in known]
        probes += [Probe(LOGITS, call.key, False, slot) for slot, value in call.writes if value == logits]
    order = {call.key: i for i, call in enumerate(calls)}
    count: dict[ValueName, int] = defaultdict(int)
    for probe in probes:
        count[probe.name] += 1
    once = [probe for probe in probes if count[probe.name] == 1]
    makers: dict[Hashable, list[tuple[Call, int]]] = defaultdict(list)
    for call in calls:
        for slot, value in call.writes:
            makers[value].append((call, slot))
    at = {call.key: call for call in calls}
    moved = [(_where_made(probe, at, makers), probe) for probe in once]
    # A product without its residual comes before the sum, which is made of it.
    ordered = sorted(
        moved,
        key=lambda m: (
            order[m[0].key],
            not m[0].before,
            not m[0].residual,
            m[0] is not m[1],
            m[1].name.what != "input",
        ),
    )
    return [probe for probe, _ in ordered]


def _where_made(
    probe: Probe, calls: Mapping[Hashable, Call], makers: Mapping[Hashable, list[tuple[Call, int]]]
) -> Probe:
    """The probe of an argument at the call that makes it, if that is one: so whatever reads it continues with the same,
    in whichever order calls come."""
    if not probe.before:
        return probe
    reader = calls[probe.key]
    writers = makers[dict(reader.reads)[probe.slot]]
    if len(writers) != 1:
        return probe
    ((maker, slot),) = writers
    if maker.views.get(("write", slot)) != reader.views.get(("read", probe.slot)):
        return probe
    return replace(probe, key=maker.key, before=False, slot=slot)


def _groups(calls: Sequence[Call], leaves: frozenset[str]) -> dict[str, list[Call]]:
    """The calls of each leaf, if they stand for nothing else."""
    groups: dict[str, list[Call]] = defaultdict(list)
    shared: set[str] = set()
    for call in calls:
        if len(call.where) == 1 and call.where[0] in leaves:
            groups[call.where[0]].append(call)
        elif len(call.where) > 1:
            shared.update(call.where)
    return {path: group for path, group in groups.items() if path not in shared}


def _of_leaf(path: str, group: Sequence[Call], calls: Sequence[Call], logits: Hashable) -> list[Probe]:
    keys = {call.key for call in group}
    writers = {value: (call, slot) for call in group for slot, value in call.writes}
    read = [(call, slot, value) for call in group for slot, value in call.reads if value not in writers]
    probes = []
    if len({value for _, _, value in read}) == 1 and all(slot >= 0 for _, slot, _ in read):
        first, slot, _ = read[0]
        probes.append(Probe(ValueName(path, "input"), first.key, True, slot))
    left = {value for call in calls if call.key not in keys for _, value in call.reads if value in writers}
    left |= {logits} & writers.keys()
    if len(left) == 1:
        call, slot = writers[left.pop()]
        probes.append(Probe(ValueName(path, "output"), call.key, False, slot))
    return probes


def pieces_of(where: Sequence[str], name: str, parts: Sequence[tuple[str, int]]) -> tuple[Piece, ...]:
    """Which rows of a product's weight are which linear's.

    Args:
        where: the product's module paths, in any order; some may be of what was fused with the linears.
        name: of the weight, as passes name it: "layers.0.q_proj+k_proj.weight".
        parts: source tensor and number of rows of each part of the weight, in order.

    Returns:
        a piece for each linear; nothing if that is unclear.
    """
    total = sum(size for _, size in parts)
    # Rows of one tensor may come in several pieces, where pruning left some out.
    parts = [(source, sum(size for _, size in run)) for source, run in groupby(parts, key=lambda part: part[0])]
    if len(where) == 1:
        return (Piece(where[0], 0, total),)
    by_source = [owner_of(where, source) for source, _ in parts]
    by_name = [owner_of(where, one) for one in _unfused(name)]
    if None not in by_source:
        owners = by_source
    elif len(by_name) == len(parts):  # sources of other names, such as a GGUF file's
        owners = by_name
    else:
        owners = by_name * len(parts) if len(by_name) == 1 else [None]
    pieces: list[Piece] = []
    start = 0
    for owner, (_, size) in zip(owners, parts, strict=False):
        if owner is None:
            return ()
        if pieces and pieces[-1].path == owner:
            pieces[-1] = Piece(owner, pieces[-1].start, start + size)
        else:
            pieces.append(Piece(owner, start, start + size))
        start += size
    return tuple(pieces)


def owner_of(where: Sequence[str], tensor: str) -> str | None:
    """The module that a tensor is of: the innermost one that its name begins with."""
    return max((path for path in where if tensor.startswith(f"{path}.")), key=len, default=None)


def _unfused(name: str) -> list[str]:
    """ "a.q+k.weight" -> "a.q.weight", "a.k.weight"."""
    words = name.split(".")
    joined = [i for i, word in enumerate(words) if "+" in word]
    if len(joined) != 1:
        return [name]
    (i,) = joined
    return [".".join([*words[:i], one, *words[i + 1 :]]) for one in words[i].split("+")]


def _apart(paths: Sequence[str], pieces: Sequence[Piece]) -> list[str]:
    """Finds the module of a product that isn't a linear, if there is just one: its activation."""
    others = [path for path in paths if path not in {piece.path for piece in pieces}]
    return others if len(others) == 1 else []


def epilogue_of(activation: bool, residual: bool) -> Epilogue:
    """The operations that a product applies before it writes: an activation, then the addition of a residual."""
    if activation and residual:
        return "both"
    return "residual" if residual else "activation" if activation else ""


def _of_call(call: Call, leaves: frozenset[str]) -> list[Probe]:
    def probe(path: str, what: What, slot: int, *, before: bool, columns: tuple[int, int] | None = None) -> Probe:
        return Probe(ValueName(path, what), call.key, before, slot, columns)

    reads, writes = dict(call.reads), dict(call.writes)
    modules = [path for path in call.where if path in leaves]
    probes: list[Probe] = []
    if call.op in LINEARS:
        if 0 in reads:
            probes += [probe(piece.path, "input", 0, before=True) for piece in call.pieces]
        if call.epilogue == "activation":
            probes += [probe(path, "output", 0, before=False) for path in _apart(modules, call.pieces)]
        elif call.epilogue == "residual" and len(call.pieces) == 1:
            probes.append(replace(probe(call.pieces[0].path, "output", 0, before=False), residual=True))
        elif not call.epilogue:
            whole = len(call.pieces) == 1
            columns = [None if whole else (p.start, p.stop) for p in call.pieces]
            probes += [
                probe(piece.path, "output", 0, before=False, columns=c)
                for piece, c in zip(call.pieces, columns, strict=True)
            ]
    elif call.op in _CASTS and 0 in reads:
        probes += [probe(path, "input", 0, before=True) for path in modules]
    elif call.op.removesuffix("_quantize") in NORMS | ADDED_NORMS and modules:
        probes += _of_norm(call, call.owner or modules[0])
    elif call.op in _ATTENTION and call.where:
        probes += [probe(call.where[0], what, slot, before=True) for slot, what in _ATTENTION[call.op] if slot in reads]
        probes += [probe(call.where[0], "context", slot, before=False) for slot in writes]
    elif call.op == "kv_write" and call.where:
        probes += [
            probe(call.where[0], what, slot, before=True)
            for (slot, _), what in zip(call.reads, _KEY_AND_VALUE, strict=False)
        ]
    elif call.op == "rope_kv_write" and call.where and len(call.reads) > _VALUE:
        probes.append(probe(call.where[0], "value", call.reads[_VALUE][0], before=True))
        probes.append(Probe(ValueName(call.where[0], "key"), call.key, False, -1, cached=True))
    elif call.op in ("moe", "combine_experts") and modules:
        probes += [probe(modules[0], "output", slot, before=False) for slot in writes]
    return probes


def _of_norm(call: Call, path: str) -> list[Probe]:
    plain, added = call.op.removesuffix("_quantize"), call.op.removesuffix("_quantize") in ADDED_NORMS
    probes = []
    if not added and any(slot == 0 for slot, _ in call.reads):
        probes.append(Probe(ValueName(path, "input"), call.key, True, 0))
    if plain == call.op:
        probes.append(Probe(ValueName(path, "output"), call.key, False, 0))
    if added:
        total = 1 if plain == call.op else _SUM_OF_QUANTIZED
        probes.append(Probe(ValueName(path, "input"), call.key, False, total, added=True))
    return probes


_KEY_AND_VALUE: tuple[What, What] = ("key", "value")
_VALUE = 2
"""The value among what ``rope_kv_write`` reads: query, key, value, table."""
