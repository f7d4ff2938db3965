"""Lowers fused ops to one step each, with the operands of both parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.node import Node

from .builder import Builder, Value
from .lower_ew import Handler, flat_output, norm_inputs

ew = torch.ops.ew


def _norm_quantize(op: str) -> Handler:
    def lower(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
        inputs, attrs = norm_inputs(b, a, rank=2)
        outs = b.results(node)
        flat = [flat_output(o, inputs[0]) for o in outs]
        b.step(op, inputs, flat, {**attrs, "group_size": int(a["group_size"])})
        return tuple(outs)

    return lower


HANDLERS: Mapping[Any, Handler] = {
    ew.rms_norm_quantize.default: _norm_quantize("rms_norm_quantize"),
    ew.layer_norm_quantize.default: _norm_quantize("layer_norm_quantize"),
    ew.add_rms_norm_quantize.default: _norm_quantize("add_rms_norm_quantize"),
    ew.add_layer_norm_quantize.default: _norm_quantize("add_layer_norm_quantize"),
}
