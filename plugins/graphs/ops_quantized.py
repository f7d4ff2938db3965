"""Emits ops on weights of 8 and 4 bits: the graph dequantizes the weights and multiplies floats.

Activations aren't rounded on this target: ``ew.quantize_activation`` returns its input. A product is DequantizeLinear
and MatMul, which onnxruntime merges if groups are along K.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.fx.node import Node

from enginewright.passes.ops.quantization import groups_of

from .graph import GraphBuilder, Handler, Value
from .ops_ew import finish
from .ops_experts import grouped_product
from .weights import Stored

ew = torch.ops.ew

_F32 = torch.float32


def _quantize_activation(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
    if a["x"] in b.spread:
        b.spread.add(node)
    x = b.cast(a["x"], _F32)
    return (x, x, x)


def _dequantized(b: GraphBuilder, a: Mapping[str, Any]) -> str:
    """Emits the weight among the arguments ``a`` as floats [.., K, N], without its offsets; returns its name."""
    weight, scales = a["weight"], a["weight_scales"]
    values = b.stored(str(weight.target), "columns", _integers(a["weight_bits"], a["weight_offsets"]))
    factors = b.scales(str(scales.target), "columns")  # [.., G, N]
    rank, size = len(b.expressions(weight)), int(b.expressions(weight)[-1])
    group = a["weight_group"]
    if group and (group != size or rank != 2):
        return b.op("DequantizeLinear", values, factors, axis=rank - 2, block_size=group)
    if rank == 2:
        return b.op("DequantizeLinear", values, b.op("Squeeze", factors, b.integers(0)), axis=1)
    return b.op("DequantizeLinear", values, factors, axis=rank - 2, block_size=size)


def _integers(bits: int, offsets: object) -> Stored:
    if bits == 8:
        return "i8"
    return "i4" if offsets is None else "u4 less 8"


def _offset_product(b: GraphBuilder, x: str, a: Mapping[str, Any], rank: int) -> str | None:
    """Emits the offsets' part of a product: the sums of x over each group, [.., G], times the offsets [.., G, N].

    Returns None if the weight has no offsets. ``rank`` is the number of dimensions of x.
    """
    if a["weight_offsets"] is None:
        return None
    groups = int(b.expressions(a["weight_offsets"])[-1])
    shape = b.integers(*[0] * (rank - 1), groups, a["weight_group"])  # 0: as it is
    sums = b.op("ReduceSum", b.op("Reshape", x, shape), b.integers(-1), keepdims=0)
    scales = b.scales(str(a["weight_scales"].target), "columns")
    offsets = b.stored(str(a["weight_offsets"].target), "columns", b.floats)
    # The integers are stored less 8. What compensates for it doesn't depend on them: a constant once it is loaded.
    return b.op("MatMul", sums, b.op("Add", offsets, b.op("Mul", scales, b.number(8.0, _F32))))


def _quantized_linear(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    x = b.value(a["values"])
    y = b.op("MatMul", x, _dequantized(b, a))
    offset = _offset_product(b, x, a, len(b.expressions(a["values"])))
    return finish(b, y if offset is None else b.op("Add", y, offset), a)


def _quantized_grouped_linear(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    offset = _offset_product(b, b.value(a["values"]), a, rank=3)
    return grouped_product(b, node, a["values"], _dequantized(b, a), a, offset)


def _quantized_embedding(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    """Emits a lookup of rows, which are then dequantized. Rows of 4 bits are gathered as bytes."""
    ids, scales, offsets = b.value(a["ids"]), a["scales"], a["offsets"]
    size = int(b.expressions(node)[-1])
    group = a["group_size"] or size
    groups = groups_of(size, a["group_size"])
    name = str(a["table"].target)
    if a["bits"] == 8:
        rows = b.op("Cast", b.op("Gather", b.stored(name, "rows", "i8"), ids, axis=0), to=1)
    else:
        rows = _four_bits(
            b, b.op("Gather", b.stored(name, "rows", "i4 pairs" if offsets is None else "u4 pairs"), ids, axis=0), size
        )
        if offsets is None:  # the upper half of the 16 values is below zero
            below = b.op("Greater", rows, b.number(7.0, _F32))
            rows = b.op("Where", below, b.op("Sub", rows, b.number(16.0, _F32)), rows)
    if groups * group != size:
        rows = b.op("Pad", rows, b.integers(0, 0, 0, groups * group - size))
    rows = b.reshape(rows, -1, groups, group)

    def spread(factors: Node) -> str:
        rows = b.op("Gather", b.stored(str(factors.target), "rows", "f32"), ids, axis=0)
        return b.op("Unsqueeze", rows, b.integers(-1))  # [N, G, 1]

    rows = b.op("Mul", rows, spread(scales))
    if offsets is not None:
        rows = b.op("Add", rows, spread(offsets))
    rows = b.reshape(rows, -1, groups * group)
    if groups * group == size:
        return rows
    return b.op("Slice", rows, b.integers(0), b.integers(size), b.integers(-1))


def _four_bits(b: GraphBuilder, packed: str, size: int) -> str:
    """Emits the unpacking of u8 [N, H/2], two values in each byte, to floats [N, H] from 0 to 15."""
    low = b.op("BitwiseAnd", packed, b.constant(np.asarray(15, np.uint8)))
    high = b.op("BitShift", packed, b.constant(np.asarray(4, np.uint8)), direction="RIGHT")
    halves = [b.op("Unsqueeze", half, b.integers(-1)) for half in (low, high)]
    return b.op("Cast", b.reshape(b.op("Concat", *halves, axis=-1), -1, size), to=1)


PRODUCTS = (ew.quantized_linear.default, ew.quantized_grouped_linear.default)

HANDLERS: Mapping[Any, Handler] = {
    ew.quantize_activation.default: _quantize_activation,
    ew.quantized_linear.default: _quantized_linear,
    ew.quantized_grouped_linear.default: _quantized_grouped_linear,
    ew.quantized_embedding.default: _quantized_embedding,
}
