"""Lowers the ops of experts: sorting (token, expert) pairs, linears of groups of rows, and combining the results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.node import Node

from .builder import Builder, Value
from .lower_ew import Handler, declared, flat_output, store_of_linear

ew = torch.ops.ew


def _grouped_linear(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    x, out = b.rows(b.view(a["x"]), rank=2), b.result(node)
    weight, group = b.product_weight(a["weight"], "weight_group")
    store, attrs = store_of_linear(b, a, x)
    inputs = [x, b.unit(b.view(a["starts"])), *weight, *store]
    b.step("grouped_linear", inputs, [flat_output(out, x)], {**group, **attrs})
    return out


HANDLERS: Mapping[Any, Handler] = {
    ew.route_experts.default: declared,
    ew.grouped_linear.default: _grouped_linear,
    ew.combine_experts.default: declared,
}
