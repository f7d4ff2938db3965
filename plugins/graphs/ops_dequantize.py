"""Emits weights of 8-bit floats by DequantizeLinear, transposed for a product, or by rows for a table.

``ew.dequantize`` itself emits nothing: its readers choose one of the two. A table is dequantized before its rows are
gathered, because Gather doesn't support 8-bit floats, and TensorRT supports them only as input of DequantizeLinear.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.quantization.round_weights import is_dequantized

from .graph import GraphBuilder, Handler, Value
from .weights import Form

ew = torch.ops.ew


def stored_weight(b: GraphBuilder, node: Node, form: Form) -> str:
    """Emits a weight of the bundle as floats, and returns its name. Raises UnsupportedModelError if the weight is
    computed from inputs.
    """
    if is_dequantized(node):
        return b.once(("dequantized", node, form), lambda: _dequantized(b, node, form))
    if node.op != "get_attr":
        raise b.unsupported("its weight is computed from the inputs")
    return b.weight(node, form)


def _dequantized(b: GraphBuilder, node: Node, form: Form) -> str:
    a = bound_arguments(node)
    values = b.stored(str(a["values"].target), form, "fp8")
    scales = b.scales(str(a["scales"].target), form)  # [.., G, N] or [.., N, G]
    rank, size, group = len(b.expressions(node)), int(b.expressions(node)[-1]), a["group_size"]
    grouped = rank - 2 if form == "columns" else rank - 1  # the axis that groups lie along
    if group or rank > 2:
        return b.op("DequantizeLinear", values, scales, axis=grouped, block_size=group or size)
    return b.op("DequantizeLinear", values, b.op("Squeeze", scales, b.integers(grouped)), axis=1 - grouped)


def _dequantize(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
    """Emits nothing; readers call ``stored_weight``."""
    return ()


HANDLERS: Mapping[Any, Handler] = {ew.dequantize.default: _dequantize}
