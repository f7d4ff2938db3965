"""Lowers experts to steps: their places sorted, linears of groups of rows, and their results combined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.node import Node

from .builder import Builder, Value
from .lower_ew import Handler, flat_output, store_of_linear

ew = torch.ops.ew


def _route_experts(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    ids = b.rows(b.view(a["expert_ids"]), rank=2)
    outs = [b.buffer(b.shape(node, i), "i32") for i in range(3)]
    b.step("route_experts", [ids], outs, {"experts": int(a["experts"])})
    return tuple(outs)


def _grouped_linear(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    x, out = b.rows(b.view(a["x"]), rank=2), b.result(node)
    weight, group = b.product_weight(a["weight"], "weight_group")
    store, attrs = store_of_linear(b, a, x)
    inputs = [x, b.unit(b.view(a["starts"])), *weight, *store]
    b.step("grouped_linear", inputs, [flat_output(out, x)], {**group, **attrs})
    return out


def _combine_experts(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    y, weights = (b.rows(b.view(a[name]), rank=2) for name in ("y", "expert_weights"))
    out = b.result(node)
    b.step("combine_experts", [y, b.unit(b.view(a["order"])), weights], [out])
    return out


HANDLERS: Mapping[Any, Handler] = {
    ew.route_experts.default: _route_experts,
    ew.grouped_linear.default: _grouped_linear,
    ew.combine_experts.default: _combine_experts,
}
