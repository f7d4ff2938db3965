"""Cuts a program at its attentions: the part between two of them is a segment.

Each call runs in the latest segment before all its readers. So a feed-forward layer parallel to an attention runs after
it, and calls for the rows of logits run at the end, and equal layers have equal segments. Values that depend only on
positions, such as the tables of rotations, are computed once, in the first segment. Values that depend only on weights
are computed in each segment that reads them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import describe_node
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.program import Program, has_tensors
from enginewright.runtime.shared.errors import UnsupportedModelError

from ...engines.segments import STEP_INPUTS

ew = torch.ops.ew

_HINT = "The cpu target may take this model, and so may the whole-model form of TensorRT-RTX engines."


@dataclass(frozen=True)
class AttentionCut:
    """An attention and the write to its cache, which are outside of segments.

    ``q`` [T, Nq, D], ``k`` [T, Nkv, D] and ``v`` [T, Nkv, Dv] are results of segments. ``node`` is the attention, whose
    result is [T, Nq, Dv]. ``sinks`` and ``slopes`` [Nq] are weights, or None.
    """

    node: Node
    layer: int
    q: Node
    k: Node
    v: Node
    scale: float
    window: int
    softcap: float
    sinks: Node | None
    slopes: Node | None


@dataclass(frozen=True)
class SegmentCut:
    """The calls of one segment.

    Attributes:
        nodes: the calls in the program's order.
        inputs: step inputs, and results of attentions and of earlier segments, in the order in which ``nodes`` read
            them.
        outputs: the values that attentions or later segments read, or that are logits; in the order of ``nodes``.
        attentions: the attentions directly after it; the last segment has none.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    attentions: tuple[AttentionCut, ...]


def cut(program: Program) -> tuple[SegmentCut, ...]:
    """Returns the segments of a program, in the order in which they run.

    Args:
        program: a program with attention in its paged form, without fused ops around it.

    Raises:
        UnsupportedModelError: a call reads caches or block tables, which only attention may, or attention needs a value
            that no segment can pass to it; names the module.
    """
    attentions = [_attention(node) for node in program.nodes_of(ew.paged_attention.default)]
    behind = _behind(program, attentions)
    constants = _constants(program)
    places = _places(program, behind, constants)
    count = 1 + max((place + 1 for place in behind.values()), default=0)
    members: list[list[Node]] = [[] for _ in range(count)]
    for node, place in places.items():
        members[place].append(node)
    return tuple(
        SegmentCut(
            (*_needed(nodes, constants), *nodes),
            _inputs(nodes, constants),
            tuple(node for node in nodes if any(places.get(user) != i for user in _readers(node))),
            tuple(a for a in attentions if behind[a.node] == i),
        )
        for i, nodes in enumerate(members)
    )


def _attention(node: Node) -> AttentionCut:
    """Returns an attention with its write. Raises UnsupportedModelError if its caches aren't those of one write, or if
    its sinks or slopes are computed.
    """
    a = bound_arguments(node)
    write = a["k_cache"].args[0]
    if not isinstance(write, Node) or write.target is not ew.kv_write.default or len(write.users) != 2:
        raise UnsupportedModelError(
            f"{describe_node(node)} attends to a cache that other attentions use, too, or that this step doesn't write",
            hint=_HINT,
        )
    for name in ("sinks", "slopes"):
        if a[name] is not None and a[name].op != "get_attr":
            raise UnsupportedModelError(f"{describe_node(node)}: its {name} aren't weights", hint=_HINT)
    w = bound_arguments(write)
    return AttentionCut(
        node=node,
        layer=int(str(w["k_cache"].target).partition(":")[2]),
        q=a["q"],
        k=w["k"],
        v=w["v"],
        scale=float(a["scale"]),
        window=int(a["window"]),
        softcap=float(a["softcap"]),
        sinks=a["sinks"],
        slopes=a["slopes"],
    )


def _behind(program: Program, attentions: Sequence[AttentionCut]) -> dict[Node, int]:
    """Returns the index of the segment before each attention; also for its write, and for the caches between them."""
    attention_nodes = {a.node for a in attentions}
    early: dict[Node, int] = {}
    for node in program.graph.nodes:
        early[node] = max((early[n] for n in node.all_input_nodes), default=0) + (node in attention_nodes)
    segment_of: dict[Node, int] = {}
    for a in attentions:
        caches = [n for n in a.node.all_input_nodes if n.target is operator.getitem and n not in (a.q, a.k, a.v)]
        for node in (a.node, *caches, *(n for cache in caches for n in cache.all_input_nodes)):
            segment_of[node] = early[a.node] - 1
    return segment_of


def _constants(program: Program) -> dict[Node, None]:
    """Returns the calls that depend only on weights, or on nothing, in the program's order."""
    constants: dict[Node, None] = {}
    for node in program.graph.nodes:
        sources = [n for n in node.all_input_nodes if has_tensors(n)]
        if (
            node.op == "call_function"
            and has_tensors(node)
            and all(n.op == "get_attr" or n in constants for n in sources)
        ):
            constants[node] = None
    return constants


def _needed(nodes: Sequence[Node], constants: Mapping[Node, None]) -> list[Node]:
    """Returns the constants that ``nodes`` depend on, directly or through other constants, in the program's order."""
    needed: set[Node] = set()
    reading = list(nodes)
    while reading:
        more = [n for n in reading.pop().all_input_nodes if n in constants and n not in needed]
        needed.update(more)
        reading += more
    return [node for node in constants if node in needed]


def _places(program: Program, behind: Mapping[Node, int], constants: Mapping[Node, None]) -> dict[Node, int]:
    """Returns the index of the segment of each call, in the program's order, except for attentions and constants.

    ``behind`` is the result of ``_behind``.
    """
    last = max((place + 1 for place in behind.values()), default=0)
    calls = [n for n in program.graph.nodes if n.op == "call_function" and n not in behind and has_tensors(n)]
    calls = [n for n in calls if n not in constants]
    late: dict[Node, int] = {}
    for node in reversed(calls):
        late[node] = min((behind.get(u, late.get(u, last)) for u in _readers(node)), default=last)
    tables = _position_tables(calls, constants)
    places: dict[Node, int] = {}
    for node in calls:
        # Several results of one call are made in one place.
        parts = node.target is operator.getitem
        places[node] = 0 if node in tables else places[node.all_input_nodes[0]] if parts else late[node]
        _check_inputs(node, behind)
    return places


def _position_tables(calls: Sequence[Node], constants: Mapping[Node, None]) -> set[Node]:
    """Returns the calls that depend only on weights and positions, such as the table of a rotation."""
    tables: set[Node] = set()
    for node in calls:
        sources = [n for n in node.all_input_nodes if n.op != "get_attr" and n not in constants and has_tensors(n)]
        if all(n in tables or str(n.target) == "positions" for n in sources):
            tables.add(node)
    return tables


def _readers(node: Node) -> Iterator[Node]:
    """Yields the readers of a tensor's values, but not those that only read its size."""
    return (user for user in node.users if user.op == "output" or has_tensors(user))


def _inputs(nodes: Sequence[Node], constants: Mapping[Node, None]) -> tuple[Node, ...]:
    """Returns the values of other nodes that ``nodes`` read, except weights and values computed from weights alone."""
    inside = {*nodes, *constants}
    read = (n for node in nodes for n in node.all_input_nodes if n.op != "get_attr" and has_tensors(n))
    return tuple(dict.fromkeys(n for n in read if n not in inside))


def _check_inputs(node: Node, behind: Mapping[Node, int]) -> None:
    for source in node.all_input_nodes:
        foreign = source.op == "placeholder" and str(source.target) not in STEP_INPUTS and has_tensors(source)
        inner = source in behind and source.target is not ew.paged_attention.default
        if foreign or inner:
            what = str(source.target) if foreign else "a cache"
            raise UnsupportedModelError(
                f"{describe_node(node)} reads {what}, which only attention does between segments", hint=_HINT
            )
