"""Lowers the ops on integers, and casts to bf16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.node import Node

from .builder import Builder, StoredRef, Value, WeightRef
from .lower_ew import Handler, flat_output, store_of_linear
from .views import View

ew = torch.ops.ew


def cast_bf16(b: Builder, node: Node, view: View) -> View:
    """Adds a cast from f32 to the nearest bf16, and returns its result. Rows are padded to an even length."""
    x, out = b.rows(view, rank=2), b.result(node)
    b.step("cast_bf16", [x], [flat_output(out, x)])
    return out


def _quantize_activation(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    x = b.rows(b.view(a["x"]), rank=2)
    outs = b.results(node)
    b.step("quantize_activation", [x], [flat_output(o, x) for o in outs], {"group_size": int(a["group_size"])})
    return tuple(outs)


def _quantized_linear(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    inputs = [b.rows(b.view(a[name]), rank=2) for name in ("values", "scales", "sums")]
    if "starts" in a:
        inputs.append(b.unit(b.view(a["starts"])))
    inputs += _weights(b, a["weight"], a["weight_scales"], a["weight_offsets"])
    store, attrs = store_of_linear(b, a, inputs[0])
    groups = {name: int(a[name]) for name in ("weight_group", "activation_group")}
    attrs |= {"has_bias": a["bias"] is not None, **_has_offsets(a["weight_offsets"])}
    out = b.result(node)
    op = "quantized_grouped_linear" if "starts" in a else "quantized_linear"
    b.step(op, [*inputs, *store], [flat_output(out, inputs[0])], {**groups, **attrs})
    return out


def _weights(b: Builder, *given: Any) -> list[View]:
    """Returns views of a weight's values, scales and offsets, without those that are None."""
    packed = []
    for one in given:
        if one is None:
            continue
        if not isinstance(one, WeightRef):
            raise b.unsupported(f"its weight is computed from the inputs, and {b.form.target} packs weights ahead")
        packed.append(b.weight(one.name, rows=False))
    return packed


def _has_offsets(offsets: Any) -> dict[str, bool]:
    """Returns the attribute ``has_offsets`` if there are offsets; otherwise no attribute, as in programs of earlier
    versions.
    """
    return {} if offsets is None else {"has_offsets": True}


def _quantized_embedding(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    ids, out = b.unit(b.view(a["ids"])), b.result(node)
    if ids.rank != 1:
        raise b.unsupported(f"ids have rank {ids.rank}, not 1")
    weights = _weights(b, a["table"], a["scales"], a["offsets"])
    attrs = {"group_size": int(a["group_size"]), **_has_offsets(a["offsets"])}
    b.step("quantized_embedding", [ids, *weights], [out], attrs)
    return out


def _dequantize(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    values, scales, offsets = a["values"], a["scales"], a["offsets"]
    if not all(isinstance(one, WeightRef) for one in (values, scales, *([] if offsets is None else [offsets]))):
        raise b.unsupported(f"its weight is computed from the inputs, and {b.form.target} packs weights ahead")
    if b.form.panels and b.program.weights[values.name].dtype == torch.int8:
        raise b.unsupported(f"{b.form.target} multiplies weights of integers by integers alone")
    return StoredRef(values, scales, offsets, int(a["group_size"]))


HANDLERS: Mapping[Any, Handler] = {
    ew.dequantize.default: _dequantize,
    ew.quantize_activation.default: _quantize_activation,
    ew.quantized_linear.default: _quantized_linear,
    ew.quantized_grouped_linear.default: _quantized_linear,
    ew.quantized_embedding.default: _quantized_embedding,
}
