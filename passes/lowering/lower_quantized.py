"""How the ops of 8-bit integers become steps, and casts to bf16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.node import Node

from .builder import Builder, Value, WeightRef
from .lower_ew import Handler, flat_output
from .views import View

ew = torch.ops.ew


def cast_bf16(b: Builder, node: Node, view: View) -> View:
    """float32 to the nearest bf16, with rows padded to an even length."""
    x, out = b.rows(view, rank=2), b.result(node)
    b.step("cast_bf16", [x], [flat_output(out, x)])
    return out


def _quantize_activation(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    x = b.rows(b.view(a["x"]), rank=2)
    outs = [b.buffer(b.shape(node, i), b.dtype(value)) for i, value in enumerate(node.meta["val"])]
    b.step("quantize_activation", [x], [flat_output(o, x) for o in outs], {"group_size": int(a["group_size"])})
    return tuple(outs)


def _quantized_linear(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    inputs = [b.rows(b.view(a[name]), rank=2) for name in ("values", "scales", "sums")]
    if "starts" in a:
        inputs.append(b.unit(b.view(a["starts"])))
    for name in ("weight", "weight_scales"):
        if not isinstance(a[name], WeightRef):
            raise b.unsupported("its weight is computed from the inputs, and the cpu target packs weights ahead")
        inputs.append(b.weight(a[name].name, rows=False))
    if a["bias"] is not None:
        inputs.append(b.unit(b.view(a["bias"])))
    attrs = {name: int(a[name]) for name in ("weight_group", "activation_group")}
    out = b.result(node)
    op = "quantized_grouped_linear" if "starts" in a else "quantized_linear"
    b.step(op, inputs, [flat_output(out, inputs[0])], {**attrs, "has_bias": a["bias"] is not None})
    return out


def _quantized_embedding(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    ids, out = b.unit(b.view(a["ids"])), b.result(node)
    if ids.rank != 1:
        raise b.unsupported(f"ids have rank {ids.rank}, not 1")
    weights = [b.weight(a[name].name, rows=False) for name in ("table", "scales")]
    b.step("quantized_embedding", [ids, *weights], [out], {"group_size": int(a["group_size"])})
    return out


HANDLERS: Mapping[Any, Handler] = {
    ew.quantize_activation.default: _quantize_activation,
    ew.quantized_linear.default: _quantized_linear,
    ew.quantized_grouped_linear.default: _quantized_linear,
    ew.quantized_embedding.default: _quantized_embedding,
}
