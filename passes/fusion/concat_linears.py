"""The common part of fusions of linears: several linears of one input become one with stacked weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.fx.node import Node

from ..ir.program import Program
from ..ir.provenance import where_of
from ..ir.quantized import formats_of_rows
from ..ir.weights import Concat, WeightExpr, Zeros

ew = torch.ops.ew


def why_not_stackable(program: Program, linears: Sequence[Node]) -> str | None:
    """Returns the reason why these ``ew.linear`` calls can't become one; None if they can."""
    if any(a.args[0] is not b.args[0] for a, b in pairwise(linears)):
        return "the linears have different inputs"
    weights = [program.weight_of(n.args[1]) for n in linears]
    biases = [(n.args[2], program.weight_of(n.args[2])) for n in linears]
    if any(w is None for w in weights) or any(a is not None and w is None for a, w in biases):
        return "a weight or bias is computed from the inputs"
    dtypes = {w.dtype for w in weights if w is not None} | {w.dtype for _, w in biases if w is not None}
    return "the weights have different types" if len(dtypes) > 1 else None


def why_kept_apart(program: Program, linears: Sequence[Node]) -> str | None:
    """Returns the reason why one linear can't replace these and keep the blocks of their source files; None if it
    can.
    """
    kinds = {formats_of_rows(_weight(program, n.args[1])) for n in linears}
    return "the weights are stored in different formats, and each keeps its own" if len(kinds) > 1 else None


def stack_linears(program: Program, linears: Sequence[Node]) -> Node:
    """Adds one ``ew.linear`` [.., N1 + N2 ..] with the stacked weights of several, and returns it.

    The linears must be stackable (``why_not_stackable``). If only some have a bias, the others get zeros.
    """
    weights = [_weight(program, n.args[1]) for n in linears]
    names = [_name(n.args[1]) for n in linears]
    weight = program.weight(join_names(names), Concat(tuple(weights)))
    bias = None
    if any(n.args[2] is not None for n in linears):
        parts = [
            Zeros(w) if n.args[2] is None else _weight(program, n.args[2])
            for n, w in zip(linears, weights, strict=True)
        ]
        named = [n.args[2] for n in linears if n.args[2] is not None]
        name = join_names([_name(b) for b in named]) if len(named) == len(linears) else f"{join_names(names)}.bias"
        bias = program.weight(name, Concat(tuple(parts)))
    return program.call(ew.linear.default, linears[0].args[0], weight, bias, where=where_of(linears))


def join_names(names: Sequence[str]) -> str:
    """Joins weights' names that differ in one part: "a.q.weight" and "a.k.weight" become "a.q+k.weight"."""
    split = [n.split(".") for n in names]
    shortest = min(len(s) for s in split)
    start = 0
    while start < shortest and len({s[start] for s in split}) == 1:
        start += 1
    end = 0
    while end < shortest - start and len({s[-1 - end] for s in split}) == 1:
        end += 1
    middle = "+".join(".".join(s[start : len(s) - end]) for s in split)
    first = split[0]
    return ".".join([*first[:start], middle, *first[len(first) - end :]])


def _weight(program: Program, node: object) -> WeightExpr:
    expr = program.weight_of(node)
    assert expr is not None
    return expr


def _name(node: object) -> str:
    assert isinstance(node, Node)
    return str(node.target)
