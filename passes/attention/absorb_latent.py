"""Turns attention whose keys and values are linear in a latent vector into attention over that vector (MLA).

Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434) computes a head's keys and values from one
latent vector c [r] of each token. A key also has a part that all heads share, such as a rotated one [p]:

    k_h = [W_h c | shared]     v_h = V_h c     score = q_h . k_h     result = sum of weights * v_h

    becomes    k = [c | shared]     score = [W_h^T q_h | q_h's rest] . k     result = V_h (sum of weights * c)

Then the cache of a token is c and the shared part, instead of the keys and values of all heads. Values are the first r
channels of keys. The products with W_h and V_h are an ``ew.grouped_linear``, with heads as its groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Pass, PassContext, PassResult, Rejection
from enginewright.passes.framework.match import bound_arguments
from enginewright.runtime.shared.kv_formats import ROTATED_CACHES
from enginewright.runtime.shared.step_schema import Q_START

from ..ir.chosen_rows import Chosen
from ..ir.program import Program
from ..ir.provenance import WHERE, join_where
from ..ir.stacked_weights import SwapAxes, Unflatten
from ..ir.weights import COMPUTED, Source, WeightExpr
from .kv_sites import MOVES, moved_rows, why_not_linear

aten, ew = torch.ops.aten, torch.ops.ew

LEAST_GAIN = 4
"""A token's cache becomes smaller by this factor at least; below it attention to the latent vector costs more."""


@dataclass(frozen=True)
class HeadRows:
    """The heads' keys or values [T, N, D], as elements of a linear's result.

    Attributes:
        linear: the linear.
        rows: [N, D], the index of the linear's output for each element, which is a row of its weight.
    """

    linear: Node
    rows: torch.Tensor

    def weight(self, program: Program) -> WeightExpr:
        """Returns the rows ``rows`` of the linear's weight, [N, D, r]."""
        whole = program.weight_of(self.linear.args[1])
        assert whole is not None
        return Unflatten(Chosen(whole, 0, tuple(self.rows.flatten().tolist())), self.rows.shape[0])


@dataclass(frozen=True)
class LatentSite:
    """An attention whose keys and values are linear in a latent vector.

    Attributes:
        latent: the node of the latent vector, [T, r].
        keys, values: the parts of the heads' keys and values that are computed from the latent vector.
        first: the channel of a key at which ``keys`` begin.
        shared: the parts of the key that all heads share, as (node [T, 1, p], channel of a key at which it begins).
    """

    latent: Node
    keys: HeadRows
    values: HeadRows
    first: int
    shared: tuple[tuple[Node, int], ...]


class AbsorbLatent(Pass):
    """Turns ``ew.attention`` over heads that are linear in a latent vector into attention over that vector.

    An attention stays unchanged if a target has no cache whose values are a part of its keys, or if the cache would not
    become smaller by a factor of ``LEAST_GAIN``. So do all of them if layers choose blocks ([adaptive_context]), since
    all heads would choose the same, or if the cache rotates keys, because values are then no part of them.
    """

    name = "absorb_latent"

    def wanted(self, context: PassContext) -> bool:
        """Implements ``Pass``: True if the recipe has no cache that excludes it."""
        return context.recipe.adaptive_context is None and not {*context.recipe.caches} & {*ROTATED_CACHES}

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        if not context.latent_caches or not self.wanted(context):
            return result
        starts: dict[int, Node] = {}
        for node in program.nodes_of(ew.attention.default):
            site = find_latent(program, node)
            if isinstance(site, str):
                if site:
                    result.rejected.append(Rejection(node.name, join_where(node.meta[WHERE]), site))
                continue
            with program.inserting_before(node):
                new = _absorbed(program, node, site, starts)
            program.replace(node, new)
            result.matched += 1
        return result


def find_latent(program: Program, attention: Node) -> LatentSite | str:
    """Returns the latent vector of an attention's keys and values, or the reason why there is none.

    The reason is "" if the attention doesn't resemble latent attention at all; such a reason isn't reported.
    """
    a = bound_arguments(attention)
    if not a["causal"] or a["biases"] is not None:
        return ""
    parts = _parts(program, a["k"])
    of_heads = [(part, at) for part, at in parts if _shared_part(part) is None]
    if len(of_heads) != 1:
        return ""
    keys, values = _rows_of(program, of_heads[0][0]), _rows_of(program, a["v"])
    if keys is None or values is None or keys.linear.args[0] is not values.linear.args[0]:
        return ""
    latent = keys.linear.args[0]
    assert isinstance(latent, Node)
    heads, key_size, value_size = *program.value(a["k"]).shape[1:], program.value(a["v"]).shape[2]
    shared = tuple((of, at) for part, at in parts if (of := _shared_part(part)) is not None)
    cached = int(program.value(latent).shape[-1]) + sum(int(program.value(p).shape[2]) for p, _ in shared)
    if program.value(latent).dim() != 2 or LEAST_GAIN * cached > heads * (key_size + value_size):
        return ""
    if program.value(a["q"]).shape[1] != heads:
        return "several heads of queries share a head of keys"
    for rows in (keys, values):
        if (reason := why_not_linear(program, rows.linear)) is not None:
            return reason
        if bound_arguments(rows.linear)["bias"] is not None:
            return "its keys or values have a bias beside the latent vector"
    return LatentSite(latent, keys, values, of_heads[0][1], shared)


def _parts(program: Program, keys: Node) -> list[tuple[Node, int]]:
    """Splits keys [T, N, D] that are a concatenation along D: returns each part with its first channel.

    Other keys are returned as one part.
    """
    a = bound_arguments(keys) if keys.target is aten.cat.default else None
    if a is None or a["dim"] % 3 != 2:
        return [(keys, 0)]
    parts, at = [], 0
    for part in a["tensors"]:
        parts.append((part, at))
        at += int(program.value(part).shape[2])
    return parts


def _shared_part(part: Node) -> Node | None:
    """Returns the node [T, 1, p] from which a part [T, N, p] of keys is expanded; None if the part isn't the same for
    all heads.
    """
    if part.target is not aten.expand.default or not isinstance(part.args[0], Node):
        return None
    shape = part.args[0].meta["val"].shape
    return part.args[0] if len(shape) == 3 and shape[1] == 1 else None


def _rows_of(program: Program, value: Node) -> HeadRows | None:
    """Returns the linear of whose result a value [T, N, D] is a part, with the value's rows; None if there is no such
    linear.
    """
    node, moves = value, list[Node]()
    while node.target in MOVES:
        moves.insert(0, node)
        node = node.all_input_nodes[0]
    if node.target is not ew.linear.default:
        return None
    rows = moved_rows(torch.arange(int(program.value(node).shape[-1]))[None], moves)
    if rows is None or tuple(rows.shape) != (1, *program.value(value).shape[1:]):
        return None
    return HeadRows(node, rows[0]) if rows.unique().numel() == rows.numel() else None


def _absorbed(program: Program, attention: Node, site: LatentSite, starts: dict[int, Node]) -> Node:
    """Adds the attention over the latent vector, and returns its result [T, N, Dv].

    ``starts`` caches the results of ``_starts`` by the number of heads; a missing one is added.
    """
    a, where = bound_arguments(attention), attention.meta[WHERE]
    q, k = a["q"], a["k"]
    heads, width = (int(n) for n in site.keys.rows.shape)
    rank = int(program.value(site.latent).shape[-1])

    def call(target: Any, *args: Any) -> Node:
        return program.call(target, *args, where=where)

    if heads not in starts:
        starts[heads] = _starts(program, heads, where)

    def part_of_query(first: int, size: int) -> Node:
        if q.target is aten.cat.default and k.target is aten.cat.default:
            for part, at in _parts(program, q):
                if (at, int(program.value(part).shape[2])) == (first, size):
                    return part
        return call(aten.slice.Tensor, q, -1, first, first + size)

    def of_each_head(x: Node, rows: HeadRows, kind: str) -> Node:
        """Multiplies x [T, N, K] by each head's weight, and returns [T, N, M]. ``kind`` is "keys", for the transposed
        weight, or "values".
        """
        weight = rows.weight(program)
        weight = SwapAxes(weight, 1, 2) if kind == "keys" else weight
        path = rows.linear.meta[WHERE]
        name = program.weight(f"{join_where(path)}.{kind}.weight", weight, where=path)
        by_head = call(aten.permute.default, x, [1, 0, 2])  # [N, T, K]
        flat = call(aten.reshape.default, by_head, [-1, weight.shape[2]])
        y = program.call(ew.grouped_linear.default, flat, starts[heads], name, None, where=path)
        return call(aten.permute.default, call(aten.view.default, y, [heads, -1, weight.shape[1]]), [1, 0, 2])

    query = of_each_head(part_of_query(site.first, width), site.keys, "keys")
    rest = [part_of_query(at, int(program.value(part).shape[2])) for part, at in site.shared]
    flat = [call(aten.select.int, part, 1, 0) for part, _ in site.shared]
    key = call(aten.unsqueeze.default, call(aten.cat.default, [site.latent, *flat], -1), 1)  # [T, 1, r + p]
    value = call(aten.slice.Tensor, key, -1, 0, rank)
    arguments = {**a, "q": call(aten.cat.default, [query, *rest], -1), "k": key, "v": value}
    if not rest:
        arguments["q"] = query
    result = call(ew.attention.default, *arguments.values())  # [T, N, r]
    # Readers view the result as [T, N * Dv]. Kernels copy it if they have to.
    return call(aten.contiguous.default, of_each_head(result, site.values, "values"))


def _starts(program: Program, heads: int, where: tuple[str, ...]) -> Node:
    """Adds the offsets of heads in a matrix of N * T rows that is sorted by head: int32 [N + 1], which ends with N
    * T.
    """
    number = Source(
        f"{COMPUTED}0..{heads}", (heads + 1,), torch.int32, lambda: torch.arange(heads + 1, dtype=torch.int32)
    )
    tokens = program.call(aten.select.int, program.inputs[Q_START], 0, -1, where=where)
    numbers = program.weight(f"heads.{heads}", number, where=where)
    return program.call(aten.mul.Tensor, numbers, tokens, where=where)
