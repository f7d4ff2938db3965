"""Fuses the projections of q, k and v into one linear: one pass over the input, and one large product."""

from __future__ import annotations

import operator

import torch
from torch.fx.node import Node, Target

from enginewright.passes.framework.base import Pass, PassContext, PassResult, Rejection
from enginewright.passes.framework.match import bound_arguments

from ..ir.program import Program
from ..ir.provenance import WHERE, join_where
from .concat_linears import stack_linears, why_kept_apart, why_not_stackable

aten, ew = torch.ops.aten, torch.ops.ew

_THROUGH: frozenset[Target] = frozenset(
    {
        ew.rms_norm.default,
        ew.layer_norm.default,
        ew.rope.default,
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.clone.default,
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        operator.getitem,
        aten.mul.Tensor,
    }
)
"""The ops that may be between a projection and attention. Their first argument is followed back to the projection."""


class FuseQkv(Pass):
    """Fuses the ``ew.linear`` calls of each attention's q, k and v into one with stacked weights, and slices its
    result.

    If the recipe keeps blocks, only linears whose weights are stored in the same format are fused.
    """

    name = "fuse_qkv"

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        order = {node: i for i, node in enumerate(program.graph.nodes)}
        for attention in program.nodes_of(ew.attention.default):
            arguments = bound_arguments(attention)
            projections = [_projection(arguments[name]) for name in ("q", "k", "v")]
            linears = list(dict.fromkeys(n for n in projections if n is not None))
            if None not in projections and len(linears) == 1:
                continue  # one linear already
            if reason := _why_not(program, projections, linears):
                where = join_where(attention.meta[WHERE])
                result.rejected.append(Rejection(attention.name, where, reason))
                continue
            alike = _stored_alike(program, linears) if context.recipe.weights.keep_blocks else [linears]
            if len(alike) > 1 and (reason := why_kept_apart(program, linears)):
                result.rejected.append(Rejection(attention.name, join_where(attention.meta[WHERE]), reason))
            for some in alike:
                if len(some) > 1:
                    _fuse(program, some, min(some, key=order.__getitem__))
            result.matched += any(len(some) > 1 for some in alike)
        return result


def _why_not(program: Program, found: list[Node | None], linears: list[Node]) -> str | None:
    if None in found:
        names = [n for n, f in zip("qkv", found, strict=True) if f is None]
        return f"{' and '.join(names)} does not come from a linear"
    return why_not_stackable(program, linears)


def _stored_alike(program: Program, linears: list[Node]) -> list[list[Node]]:
    """Divides linears into groups whose weights are stored in the same format."""
    groups: list[list[Node]] = []
    for linear in linears:
        same = next((some for some in groups if why_kept_apart(program, [some[0], linear]) is None), None)
        if same is None:
            groups.append([linear])
        else:
            same.append(linear)
    return groups


def _projection(value: object) -> Node | None:
    """Returns the linear that computes a value, directly or before ops in ``_THROUGH``; None if there is none."""
    while isinstance(value, Node):
        if value.target is ew.linear.default:
            return value
        if value.target not in _THROUGH:
            return None
        value = value.args[0]
    return None


def _fuse(program: Program, linears: list[Node], first: Node) -> None:
    parts: list[Node] = []
    with program.inserting_before(first):
        stacked = stack_linears(program, linears)
        start = 0
        for linear in linears:
            stop = start + int(program.value(linear).shape[-1])
            parts.append(program.call(aten.slice.Tensor, stacked, -1, start, stop, where=linear.meta[WHERE]))
            start = stop
    # Only now, for ``first``, before which the parts stand, goes with the others.
    for linear, part in zip(linears, parts, strict=True):
        program.replace(linear, part)
