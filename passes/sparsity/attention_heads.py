"""Finds attentions whose heads can be removed, and removes heads.

A head is made of rows of the weights of q, k and v, and columns of the linear after the attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Rejection
from enginewright.passes.framework.match import bound_arguments

from ..attention.kv_sites import Branch, Site, find_site
from ..ir.chosen_rows import Chosen
from ..ir.program import Program
from ..ir.provenance import WHERE, join_where
from ..ir.weights import WeightExpr

aten, ew = torch.ops.aten, torch.ops.ew

_OF_EACH_HEAD = ("sinks", "slopes")
"""The arguments of an attention that have one number for each query head, [Nq]."""


@dataclass(frozen=True)
class Heads:
    """An attention whose heads can be removed. ``site`` has its projections and the linear that reads its result."""

    site: Site

    @property
    def path(self) -> str:
        return self.site.path

    @property
    def queries(self) -> int:
        """The number of query heads, Nq."""
        return len(self.site.q.rows)

    @property
    def groups(self) -> int:
        """The number of key/value heads, Nkv."""
        return len(self.site.k.rows)

    @property
    def value_size(self) -> int:
        """The size of a value head, Dv."""
        return int(self.site.v.rows.shape[1])

    def columns(self, queries: Sequence[int]) -> list[int]:
        """Returns the columns of the linear after the attention that multiply the results of these query heads."""
        return [h * self.value_size + i for h in queries for i in range(self.value_size)]

    def keep(self, program: Program, queries: Sequence[int], groups: Sequence[int], output: WeightExpr) -> None:
        """Removes heads from a program.

        Args:
            program: the program.
            queries, groups: the indices of the query heads and of the key/value heads that stay.
            output: the new weight of the linear after the attention, [H, queries * Dv].
        """
        site = self.site
        branches = [(site.q, queries), (site.k, groups), (site.v, groups)]
        rows: dict[Node, list[int]] = {}
        places: list[tuple[int, int]] = []
        for branch, heads in branches:
            linear_rows = rows.setdefault(branch.linear, [])
            start = len(linear_rows)
            linear_rows += branch.rows[list(heads)].flatten().tolist()
            places.append((start, len(linear_rows)))
        for linear, chosen in rows.items():
            for argument in linear.args[1:3]:
                _choose(program, argument, chosen)
            linear.meta["val"] = program.infer(linear)
        for (branch, heads), place in zip(branches, places, strict=True):
            _see_heads(program, branch, place, len(heads))
        arguments = bound_arguments(site.attention)
        for name in _OF_EACH_HEAD:
            _choose(program, arguments.get(name), list(queries))
        site.attention.meta["val"] = program.infer(site.attention)
        weight, before = site.output.args[1], site.output.args[0]
        assert isinstance(weight, Node)
        assert isinstance(before, Node)
        program.change_weight(weight, output)
        with program.inserting_before(site.output):
            size = len(queries) * self.value_size
            side_by_side = program.call(aten.view.default, site.attention, [-1, size], where=before.meta[WHERE])
        site.output.update_arg(0, side_by_side)
        site.output.meta["val"] = program.infer(site.output)


def attention_heads(program: Program) -> tuple[list[Heads], list[Rejection]]:
    """Returns the attentions whose heads can be removed, in order, and rejections of the others."""
    prunable: list[Heads] = []
    rejected: list[Rejection] = []
    for node in program.nodes_of(ew.attention.default):
        site = find_site(program, node)
        reason = site if isinstance(site, str) else _why_not(program, site)
        if isinstance(site, str) or reason is not None:
            rejected.append(Rejection(node.name, join_where(node.meta[WHERE]), reason or ""))
        else:
            prunable.append(Heads(site))
    return prunable, rejected


def _why_not(program: Program, site: Site) -> str | None:
    branches = (site.q, site.k, site.v)
    ends = {branch.pre for branch in branches}
    for branch in branches:
        one_by_one = (branch.pre, *branch.post)
        if any(len(node.users) > 1 for node in one_by_one):
            return f"what {branch.linear.name} gives is read by others than the attention"
        rows = [row for b in branches if b.linear is branch.linear for row in b.rows.flatten().tolist()]
        if sorted(rows) != list(range(int(program.value(branch.linear).shape[-1]))):
            return f"{branch.linear.name} has other rows than those of heads"
        waiting = list(branch.linear.users) if branch.linear not in ends else []
        while waiting:
            node = waiting.pop()
            if node in ends:
                continue
            if len(node.all_input_nodes) != 1 or node.target is ew.linear.default:
                return f"{branch.linear.name} is also read by {node.name}"
            waiting += node.users
    arguments = bound_arguments(site.attention)
    for name in _OF_EACH_HEAD:
        argument = arguments.get(name)
        if isinstance(argument, Node) and (program.weight_of(argument) is None or len(argument.users) > 1):
            return f"its {name} are not its own"
    return None


def _choose(program: Program, argument: object, kept: Sequence[int]) -> None:
    expr = program.weight_of(argument)
    if isinstance(argument, Node) and expr is not None:
        program.change_weight(argument, Chosen(expr, 0, tuple(kept)))


def _see_heads(program: Program, branch: Branch, place: tuple[int, int], heads: int) -> None:
    """Replaces the view of some columns of a linear's result by a view [T, heads, D].

    ``place`` has the first column and the end of the columns.
    """
    value, old, where = branch.linear, branch.pre, branch.pre.meta[WHERE]
    with program.inserting_before(old):
        if place != (0, int(program.value(value).shape[-1])):
            value = program.call(aten.slice.Tensor, value, -1, *place, where=where)
        new = program.call(aten.view.default, value, [-1, heads, int(branch.rows.shape[1])], where=where)
    program.replace(old, new)
    for node in branch.post:
        node.meta["val"] = program.infer(node)
