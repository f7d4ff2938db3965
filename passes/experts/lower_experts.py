"""Lowers a layer of experts to two grouped linears. Their rows are the (token, expert) pairs of a step, sorted by
expert.

    order, rows, starts = ew.route_experts(expert_ids, E)
    y = ew.grouped_linear(ew.take_rows(x, rows), starts, gate_up, gate_up_bias)
    y = activation(y)
    out = ew.combine_experts(ew.grouped_linear(y, starts, down, down_bias), order, expert_weights)

So formats of weights apply to experts as to other linears, and an expert's weights are read once for all its tokens.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Pass, PassContext, PassResult, free_of
from enginewright.passes.framework.match import bound_arguments

from ..ir.program import Program
from ..ir.provenance import WHERE
from ..ops.activation import ACTIVATIONS

aten, ew = torch.ops.aten, torch.ops.ew


class LowerExperts(Pass):
    """Turns every ``ew.moe`` into ``ew.route_experts``, ``ew.grouped_linear`` and ``ew.combine_experts``."""

    name = "lower_experts"
    ensures = (free_of(ew.moe.default, name="no experts in the captured form are left"),)

    def call(self, program: Program, context: PassContext) -> PassResult:
        nodes = program.nodes_of(ew.moe.default)
        for node in nodes:
            with program.inserting_before(node):
                new = _lower(program, node)
            program.replace(node, new)
        return PassResult(matched=len(nodes))


def _lower(program: Program, node: Node) -> Node:
    a, where = bound_arguments(node), node.meta[WHERE]
    experts = int(program.value(a["gate_up"]).shape[0])
    routed = program.call(ew.route_experts.default, a["expert_ids"], experts, where=where)
    order, rows, starts = (program.call(operator.getitem, routed, i, where=where) for i in range(3))
    x = program.call(ew.take_rows.default, a["x"], rows, where=where)  # [T*k, H]
    y = program.call(ew.grouped_linear.default, x, starts, a["gate_up"], a["gate_up_bias"], where=where)
    y = _activation(program, y, a, where)  # [T*k, I]
    y = program.call(ew.grouped_linear.default, y, starts, a["down"], a["down_bias"], where=where)
    return program.call(ew.combine_experts.default, y, order, a["expert_weights"], where=where)


def _activation(program: Program, y: Node, a: dict[str, Any], where: tuple[str, ...]) -> Node:
    """Adds the activation of ``ew.moe`` to ``y``, and returns its result.

    It is one op if the activation is gated and has no limit or other extras, otherwise several. ``a`` has the arguments
    of ``ew.moe``.
    """
    kind, gated, alpha, limit, offset = (a[name] for name in ("kind", "gated", "alpha", "limit", "offset"))

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        return program.call(target, *args, where=where, **kwargs)

    if gated and kind in ACTIVATIONS and alpha == 1.0 and not limit and not offset:
        return call(ew.gated_activation.default, y, kind)
    width = int(program.value(y).shape[-1])
    gate, up = y, None
    if gated:
        gate, up = (call(aten.slice.Tensor, y, -1, at, at + width // 2) for at in (0, width // 2))
    if limit:
        gate = call(aten.clamp.default, gate, None, limit)
    if alpha != 1.0:
        steep = call(aten.mul.Tensor, gate, alpha)
        active = call(aten.mul.Tensor, gate, call(aten.sigmoid.default, steep))
    elif kind == "relu2":
        positive = call(aten.relu.default, gate)
        active = call(aten.mul.Tensor, positive, positive)
    elif kind == "gelu_tanh":
        active = call(aten.gelu.default, gate, approximate="tanh")
    else:
        active = call(getattr(aten, kind).default, gate)
    if up is None:
        return active
    if limit:
        up = call(aten.clamp.default, up, -limit, limit)
    if offset:
        up = call(aten.add.Tensor, up, offset)
    return call(aten.mul.Tensor, active, up)
