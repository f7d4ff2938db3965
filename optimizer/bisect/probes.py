"""Probes: the arguments and results of a program's calls that are observed, in a Program's nodes or a bundle's steps.

The rules are the same for both. A leaf is a module without modules in it, and has a group of calls with its path. The
value that the group reads from other calls is the leaf's input, and the value that other calls read from the group is
its output, if there is one value each. A call that stands for several modules (a fusion) has the probes of its op.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from enginewright.passes.ir.calls import ADDED_NORMS, LINEARS, NORMS, Call
from enginewright.passes.ir.value_name import LOGITS, ValueName, What

_SUM_OF_QUANTIZED = 3
"""The index of the sum among the results of an added norm that is quantized: after values, scales and their sums."""
_CASTS = frozenset({"quantize_activation", "cast_bf16"})
_ATTENTION: Mapping[str, tuple[tuple[int, What], ...]] = {
    "attention": ((0, "query"), (1, "key"), (2, "value")),
    "paged_attention": ((0, "query"),),
}


@dataclass(frozen=True)
class Probe:
    """An argument or result of a call that is observed, or some of its columns.

    Attributes:
        name: the name of the value.
        key: the key of the call.
        before: True for argument number ``slot`` of the call ``key``, False for its result.
        slot: the number of the argument or result.
        columns: the first column and the one after the last; None for all.
        cached: True if the value is the keys that the call writes to the cache for its tokens.
        added: True if the value is the sum of the first two arguments, which the call itself computes. To replace the
            sum, an argument has to be replaced.
        residual: True if the value is the result without the residual that the call adds to it.
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
    """Returns the probes of a program, in the order of execution, without values that two calls would have.

    Args:
        calls: of the program, in order.
        leaves: the paths of the modules without modules in them.
        logits: the program's result, as ``Call.writes`` names it.
    """
    probes: list[Probe] = []
    groups = _groups(calls, leaves)
    for path, group in groups.items():
        probes += _of_leaf(path, group, calls, logits)
    known = {probe.name for probe in probes}
    for call in calls:
        probes += [probe for probe in _probes_of_call(call, leaves) if probe.name not in known]
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
    """Moves the probe of a call's argument to the call that computes this value, as a probe of its result.

    All readers of the value then get the replacement, whatever their order. Other probes are returned unchanged:
    probes of results, and those of arguments that no call or several calls write, or that are read in another view.
    """
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
    """Returns the calls of each leaf whose calls stand for no other module."""
    groups: dict[str, list[Call]] = defaultdict(list)
    shared: set[str] = set()
    for call in calls:
        if len(call.where) == 1 and call.where[0] in leaves:
            groups[call.where[0]].append(call)
        elif len(call.where) > 1:
            shared.update(call.where)
    return {path: group for path, group in groups.items() if path not in shared}


def _of_leaf(path: str, group: Sequence[Call], calls: Sequence[Call], logits: Hashable) -> list[Probe]:
    """Returns the input and the output of the leaf at ``path``, whose calls are ``group``."""
    keys = {call.key for call in group}
    writers = {value: (call, slot) for call in group for slot, value in call.writes}
    read = [(call, slot, value) for call in group for slot, value in call.reads if value not in writers]
    probes = []
    if len({value for _, _, value in read}) == 1 and all(slot >= 0 for _, slot, _ in read):
        first, slot, _ = read[0]
        probes.append(Probe(ValueName(path, "input"), first.key, True, slot))
    outputs = {value for call in calls if call.key not in keys for _, value in call.reads if value in writers}
    outputs |= {logits} & writers.keys()
    if len(outputs) == 1:
        call, slot = writers[outputs.pop()]
        probes.append(Probe(ValueName(path, "output"), call.key, False, slot))
    return probes


def _probes_of_call(call: Call, leaves: frozenset[str]) -> list[Probe]:
    """Returns the probes of values that a call reads or writes, as far as its op is known to have them.

    ``leaves``: the paths of modules without submodules.
    """
    find = _FIND_BY_OP.get(call.op)
    return [] if find is None else find(call, [path for path in call.where if path in leaves])


def _probe(call: Call, path: str, what: What, slot: int, *, before: bool = False, **details: Any) -> Probe:
    return Probe(ValueName(path, what), call.key, before, slot, **details)


def _of_product(call: Call, modules: Sequence[str]) -> list[Probe]:
    """Returns the inputs of the linears of a product, and their outputs as far as the epilogue leaves them."""
    pieces = call.pieces
    reads_input = any(slot == 0 for slot, _ in call.reads)
    probes = [_probe(call, piece.path, "input", 0, before=True) for piece in pieces if reads_input]
    if call.epilogue == "activation":
        others = [path for path in modules if path not in {piece.path for piece in pieces}]
        if len(others) == 1:  # the module of the activation
            probes.append(_probe(call, others[0], "output", 0))
    elif len(pieces) == 1 and call.epilogue in ("", "residual"):
        probes.append(_probe(call, pieces[0].path, "output", 0, residual=call.epilogue == "residual"))
    elif not call.epilogue:
        probes += [_probe(call, piece.path, "output", 0, columns=(piece.start, piece.stop)) for piece in pieces]
    return probes


def _of_cast(call: Call, modules: Sequence[str]) -> list[Probe]:
    reads_input = any(slot == 0 for slot, _ in call.reads)
    return [_probe(call, path, "input", 0, before=True) for path in modules if reads_input]


def _of_norm(call: Call, modules: Sequence[str]) -> list[Probe]:
    if not modules:
        return []
    path, plain = call.owner or modules[0], call.op.removesuffix("_quantize")
    added, quantized = plain in ADDED_NORMS, plain != call.op
    probes = []
    if not added and any(slot == 0 for slot, _ in call.reads):
        probes.append(_probe(call, path, "input", 0, before=True))
    if not quantized:
        probes.append(_probe(call, path, "output", 0))
    if added:
        probes.append(_probe(call, path, "input", _SUM_OF_QUANTIZED if quantized else 1, added=True))
    return probes


def _of_attention(call: Call, modules: Sequence[str]) -> list[Probe]:
    reads = dict(call.reads)
    arguments = [(slot, what) for slot, what in _ATTENTION[call.op] if slot in reads]
    probes = [_probe(call, path, what, slot, before=True) for path in call.where[:1] for slot, what in arguments]
    return probes + [_probe(call, path, "context", slot) for path in call.where[:1] for slot, _ in call.writes]


def _of_cache_write(call: Call, modules: Sequence[str]) -> list[Probe]:
    written = zip(call.reads, _KEY_AND_VALUE, strict=False)
    return [_probe(call, path, what, slot, before=True) for path in call.where[:1] for (slot, _), what in written]


def _of_rotated_write(call: Call, modules: Sequence[str]) -> list[Probe]:
    if not call.where or len(call.reads) <= _VALUE:
        return []
    value = _probe(call, call.where[0], "value", call.reads[_VALUE][0], before=True)
    return [value, _probe(call, call.where[0], "key", -1, cached=True)]


def _of_experts(call: Call, modules: Sequence[str]) -> list[Probe]:
    return [_probe(call, path, "output", slot) for path in modules[:1] for slot, _ in call.writes]


_KEY_AND_VALUE: tuple[What, What] = ("key", "value")
_VALUE = 2
"""The index of the value among the arguments of ``rope_kv_write``: query, key, value, table."""
_FIND_BY_OP: Mapping[str, Callable[[Call, Sequence[str]], list[Probe]]] = {
    **dict.fromkeys(LINEARS, _of_product),
    **dict.fromkeys(_CASTS, _of_cast),
    **dict.fromkeys((name + suffix for name in NORMS | ADDED_NORMS for suffix in ("", "_quantize")), _of_norm),
    **dict.fromkeys(_ATTENTION, _of_attention),
    "kv_write": _of_cache_write,
    **dict.fromkeys(("rope_kv_write", "rope_kv_write_with_ends"), _of_rotated_write),
    **dict.fromkeys(("moe", "combine_experts"), _of_experts),
}
"""Op -> the function that finds the probes of a call.

It gets the call and the paths of the leaves that the call computes.
"""
