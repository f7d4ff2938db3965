"""Emits ``ew`` ops on floats: embeddings, products, norms and rotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.fx.node import Node

from enginewright.passes.quantization.round_weights import is_dequantized

from .graph import GraphBuilder, Handler, Value
from .ops_dequantize import stored_weight
from .ops_elementwise import activation

ew = torch.ops.ew

_F32 = torch.float32


def _embedding(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    table = stored_weight(b, a["table"], "rows") if is_dequantized(a["table"]) else b.value(a["table"])
    return b.op("Gather", table, b.value(a["ids"]), axis=0)


def product(b: GraphBuilder, x: object, weight: Node) -> str:
    """Emits x [.., K] times a weight [N, K], and returns the result [.., N].

    A weight that is also read as a table isn't transposed, so that it is stored once.
    """
    if weight.op != "get_attr" and not is_dequantized(weight):
        return b.op("MatMul", b.cast(x, _F32), b.op("Transpose", b.value(weight), perm=[1, 0]))
    if all(user.target is ew.linear.default for user in weight.users):
        return b.op("MatMul", b.cast(x, _F32), stored_weight(b, weight, "columns"))
    assert isinstance(x, Node)
    rows = b.cast(x, _F32)
    sizes = b.expressions(x)
    if len(sizes) == 2:
        return b.op("Gemm", rows, stored_weight(b, weight, "rows"), transB=1)
    flat = b.op("Gemm", b.reshape(rows, -1, int(sizes[-1])), stored_weight(b, weight, "rows"), transB=1)
    return b.op("Reshape", flat, b.shape((*sizes[:-1], b.expressions(weight)[0])))


def finish(b: GraphBuilder, y: str, a: Mapping[str, Any]) -> str:
    """Adds the bias, activation and residual of a linear with the arguments ``a`` to the product ``y``; returns the
    result.
    """
    if a["bias"] is not None:
        y = b.op("Add", y, b.cast(a["bias"], _F32))
    if a["activation"]:
        y = activation(b, a["activation"], y)
    return y if a.get("residual") is None else b.op("Add", y, b.cast(a["residual"], _F32))


def _linear(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    return finish(b, product(b, a["x"], a["weight"]), a)


def _norm(kind: str) -> Handler:
    def emit(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
        x = b.cast(a["x"], _F32)
        total = b.op("Add", x, b.cast(a["residual"], _F32)) if "residual" in a else x
        weight = a["weight"]
        size = int(b.expressions(a["x"])[-1])
        inputs = [total, b.constant(np.ones(size, np.float32)) if weight is None else b.cast(weight, _F32)]
        if a.get("bias") is not None:
            inputs.append(b.cast(a["bias"], _F32))
        normed = b.op(kind, *inputs, axis=-1, epsilon=float(a["eps"]))
        return (normed, total) if "residual" in a else normed

    return emit


def _rope_table(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    """Emits the cosines and sines [N, 1, F] for rotations, and returns both next to each other, [N, 2F], for other
    readers.
    """
    positions = b.op("Unsqueeze", b.cast(a["positions"], _F32), b.integers(1, 2))  # [N, 1, 1]
    angles = b.op("Mul", positions, b.cast(a["inv_freq"], _F32))  # [N, 1, F]
    halves = [b.op(kind, angles) for kind in ("Cos", "Sin")]
    if a["scale"] != 1:
        halves = [b.op("Mul", half, b.number(a["scale"], _F32)) for half in halves]
    b.halves[node] = (halves[0], halves[1])
    return b.op("Squeeze", b.op("Concat", *halves, axis=-1), b.integers(1))


def _rope(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    """Emits a rotation. For ONNX's operator, each token is a sequence of length 1 of a batch: [N, heads, 1, D]."""
    table = a["table"]
    if table not in b.halves:
        width = int(b.expressions(table)[-1]) // 2
        wide = b.op("Unsqueeze", b.cast(table, _F32), b.integers(1))
        b.halves[table] = b.ops("Split", (wide, b.integers(width, width)), 2, axis=-1)  # type: ignore[assignment]
    cosines, sines = b.halves[table]
    rotated, size = int(b.expressions(table)[-1]), int(b.expressions(a["x"])[-1])
    x = b.op("Unsqueeze", b.cast(a["x"], _F32), b.integers(2))
    attributes: dict[str, Any] = {"interleaved": int(a["interleaved"])} | (
        {"rotary_embedding_dim": rotated} if rotated < size else {}
    )
    return b.op("Squeeze", b.op("RotaryEmbedding", x, cosines, sines, **attributes), b.integers(2))


def _gated_activation(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    width = int(b.expressions(node)[-1])
    gate, up = b.ops("Split", (b.cast(a["gate_up"], _F32), b.integers(width, width)), 2, axis=-1)
    return b.op("Mul", activation(b, a["kind"], gate), up)


PRODUCTS = (ew.linear.default,)
"""Calls that multiply by their argument ``weight``."""

HANDLERS: Mapping[Any, Handler] = {
    ew.embedding.default: _embedding,
    ew.linear.default: _linear,
    ew.rms_norm.default: _norm("RMSNormalization"),
    ew.layer_norm.default: _norm("LayerNormalization"),
    ew.add_rms_norm.default: _norm("RMSNormalization"),
    ew.add_layer_norm.default: _norm("LayerNormalization"),
    ew.rope_table.default: _rope_table,
    ew.rope.default: _rope,
    ew.gated_activation.default: _gated_activation,
}
