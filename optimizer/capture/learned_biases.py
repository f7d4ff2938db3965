"""Finds biases of attention that are looked up in a table by the distance of two tokens (MPNet, T5).

A model computes the row of each pair of tokens from their positions, and adds what the table has there to the scaled
scores. The rows are evaluated for a sequence of the longest length: they must depend on the distance alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import WHERE
from enginewright.passes.ir.weights import COMPUTED, Source

from .known_values import Sequence, UnknownError, known_nodes

aten = torch.ops.aten

_MOVES: tuple[object, ...] = (
    *(aten.permute, aten.transpose, aten.unsqueeze, aten.squeeze, aten.expand, aten.clone, aten.alias, aten.view),
    *(aten.contiguous, aten.dropout, aten._unsafe_view),
)
_TRIED = 17
"""The length of the sequence on which the path from the table to the scores is tested."""


def take_learned_biases(program: Program, softmaxes: list[Node], longest: int) -> dict[Node, Node]:
    """Removes the additions of biases before softmaxes, in place, and returns the biases of each softmax, [N, 2W-1].

    ``longest``: the model's maximum sequence length. A bias that isn't proved to depend on the distance stays.
    """
    known, tables = known_nodes(program), dict[Node, Node | None]()
    biases: dict[Node, Node] = {}
    for softmax in softmaxes:
        place = _addition(softmax, known)
        if place is None:
            continue
        addition, scores, bias = place
        if bias not in tables:
            tables[bias] = _by_distance(program, bias, known, longest)
        table = tables[bias]
        if table is not None and program.shape(scores) == program.shape(addition):
            biases[softmax] = table
            program.replace(addition, scores)
    return biases


def _addition(softmax: Node, known: set[Node]) -> tuple[Node, Node, Node] | None:
    """Returns (addition, scores, bias) of a softmax to whose scores a bias is added; None if there is none.

    After the bias, only known values, such as a mask, may be added.
    """
    node = softmax.args[0]
    while isinstance(node, Node) and node.op == "call_function":
        unknown = [a for a in node.all_input_nodes if a not in known]
        if node.target is aten.add.Tensor and len(unknown) == 2 and not node.kwargs:
            first, second = (_lookup(a, known) for a in unknown)
            if (first is None) == (second is None):
                return None
            return (node, unknown[1], unknown[0]) if first is not None else (node, unknown[0], unknown[1])
        packet = getattr(node.target, "overloadpacket", None)
        if len(unknown) != 1 or not (packet in _MOVES or (node.target is aten.add.Tensor and not node.kwargs)):
            return None
        node = unknown[0]
    return None


def _lookup(node: Node, known: set[Node]) -> Node | None:
    """Returns the lookup in a table, by known rows, of which ``node`` is a view; None if it isn't one."""
    while getattr(node.target, "overloadpacket", None) in _MOVES:
        node = next(a for a in node.all_input_nodes if a not in known)
    if node.target is not aten.embedding.default:
        return None
    table, rows = node.args[:2]
    of_weight = isinstance(table, Node) and table.op == "get_attr" and table not in known
    return node if of_weight and rows in known else None


def _by_distance(program: Program, bias: Node, known: set[Node], longest: int) -> Node | None:
    """Returns a node with the bias of each head at each distance, [N, 2W-1]; None if the bias has another form."""
    lookup = _lookup(bias, known)
    assert lookup is not None
    table, rows = lookup.args[:2]
    assert isinstance(table, Node) and isinstance(rows, Node)
    try:
        picked = Sequence(program, known, longest).value(rows).reshape(longest, longest)
        if not _only_moved(Sequence(program, known, min(_TRIED, longest)), lookup, bias):
            return None
    except (UnknownError, RuntimeError):
        return None
    distances = torch.arange(longest)[None, :] - torch.arange(longest)[:, None]
    by_distance = torch.cat((picked[:, 0].flip(0), picked[0, 1:]))  # from 1 - longest to longest - 1
    if not torch.equal(by_distance[distances + longest - 1], picked):
        return None
    width = longest
    while width > 1 and bool((by_distance[[longest - width, longest + width - 2]] == _edges(by_distance, width)).all()):
        width -= 1
    near = by_distance[longest - width : longest + width - 1].clone()
    where = bias.meta[WHERE]
    name = f"{where[0]}.distance_rows".lstrip(".")
    with program.inserting_before(lookup):
        index = program.weight(
            name, Source(f"{COMPUTED}{name}", tuple(near.shape), near.dtype, near.clone), where=where
        )
        columns: Any = program.call(aten.embedding.default, table, index, where=where)  # [2W-1, N]
        columns = program.call(aten.permute.default, columns, [1, 0], where=where)
        return program.call(aten.clone.default, columns, where=where, memory_format=torch.contiguous_format)


def _edges(by_distance: torch.Tensor, width: int) -> torch.Tensor:
    """Returns the two entries of ``by_distance`` at the distances -(width - 2) and width - 2."""
    middle = len(by_distance) // 2
    return by_distance[[middle - (width - 2), middle + (width - 2)]]


def _only_moved(sequence: Sequence, lookup: Node, bias: Node) -> bool:
    """Returns True if the ops from a lookup [S, S, N] to a bias only move the axis of heads to the front."""
    length = sequence.length
    heads = sequence.shape(lookup)[-1]
    numbers = torch.rand(sequence.shape(lookup), generator=torch.Generator().manual_seed(0))
    chain, node = list[Node](), bias
    while node is not lookup:
        chain.append(node)
        node = next(a for a in node.all_input_nodes if a not in sequence.known)
    values: dict[Node, torch.Tensor] = {lookup: numbers}
    for node in reversed(chain):
        values = {node: sequence.call(node, values)}
    (value,) = values.values()
    expected = numbers.reshape(length, length, heads).permute(2, 0, 1)
    return value.numel() == expected.numel() and torch.equal(value.reshape(expected.shape), expected)
