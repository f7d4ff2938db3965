"""Emits paged attention: TensorScatter into a request's slot, then attention over the whole slot with a mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper
from torch.fx.node import Node

from ..steps.linear_io import INPUT_IDS, POSITION_IDS, WRITE_INDEX, cache_names, mask_name
from .graph import GraphBuilder, Handler, Value

ew = torch.ops.ew

_F32 = torch.float32


def _requests(b: GraphBuilder, x: object, heads: int, size: int) -> str:
    """Reshapes x [N, heads, size] to [B, heads, S, size], and returns the result."""
    batch = b.once("B, S", lambda: b.op("Shape", INPUT_IDS))
    shape = b.once(("heads", heads, size), lambda: b.op("Concat", batch, b.integers(heads, size), axis=0))
    return b.op("Transpose", b.op("Reshape", b.cast(x, _F32), shape), perm=[0, 2, 1, 3])


def _kv_write(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
    layer = int(str(a["k_cache"].target).partition(":")[2])
    written = []
    for argument, (past, present) in zip(("k", "v"), cache_names(layer), strict=True):
        _, heads, size = b.expressions(a[argument])
        shape: list[str | int | None] = ["B", int(heads), b.capacity, int(size)]
        b.inputs[past] = helper.make_tensor_value_info(past, b.element, shape)
        b.outputs[present] = helper.make_tensor_value_info(present, b.element, shape)
        update = _requests(b, a[argument], int(heads), int(size))
        written.append(b.op("TensorScatter", past, update, WRITE_INDEX, name=present, axis=2, mode="linear"))
    return tuple(written)


def _mask(b: GraphBuilder, window: int) -> str:
    """Returns the mask, bool [B, 1, S, C], which is True for keys that a token attends to.

    It is an input of the graph. If the capacity of slots is fixed, as for GPUs, it is computed in the graph instead: as
    an input it would have 17 MB for 4 prompts of 512 tokens in slots of 8,192 positions.
    """
    if isinstance(b.capacity, int):
        capacity = b.capacity
        return b.once(("mask", window), lambda: _computed_mask(b, capacity, window))
    name = mask_name(window)
    b.inputs[name] = helper.make_tensor_value_info(name, TensorProto.BOOL, ["B", 1, "S", b.capacity])
    return name


def _computed_mask(b: GraphBuilder, capacity: int, window: int) -> str:
    """Emits the mask of slots with ``capacity`` positions: keys up to the token's position, in its window if there is
    one.

    A token's position is computed from ``write_index`` and its index in the step, because the model limits position
    ids.
    """
    keys = b.once("keys", lambda: b.constant(np.arange(capacity, dtype=np.int64)))  # [C]
    tokens = b.once("S", lambda: b.op("Shape", INPUT_IDS, start=1, end=2))
    steps = b.once("steps", lambda: b.op("Slice", keys, b.integers(0), tokens, b.integers(0)))  # [S]
    first = b.once("first", lambda: b.op("Unsqueeze", WRITE_INDEX, b.integers(1)))  # [B, 1]
    places = b.once("places", lambda: b.op("Unsqueeze", b.op("Add", first, steps), b.integers(1, 3)))  # [B, 1, S, 1]
    seen = b.op("LessOrEqual", keys, places)
    if not window:
        return seen
    return b.op("And", seen, b.op("Greater", keys, b.op("Sub", places, b.integers(window))))


def _paged_attention(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    _, heads, size = (int(s) if s.is_Integer else 0 for s in b.expressions(a["q"]))
    value_size = int(b.expressions(node)[-1])
    q = _requests(b, a["q"], heads, size)
    keys, values = b.value(a["k_cache"]), b.value(a["v_cache"])
    mask = _mask(b, int(a["window"]))
    # A graph with slots of a fixed size is for TensorRT, whose operator wants keys and values of one size.
    unlike = b.capacity != "C" and value_size != size
    if a["softcap"] or a["sinks"] is not None or a["slopes"] is not None or unlike:
        y = _op_by_op(b, a, q, keys, values, mask, heads)
    else:
        y = b.op("Attention", q, keys, values, mask, scale=float(a["scale"]))
    return b.reshape(b.op("Transpose", y, perm=[0, 2, 1, 3]), -1, heads, value_size)


def _op_by_op(b: GraphBuilder, a: Mapping[str, Any], q: str, keys: str, values: str, mask: str, heads: int) -> str:
    """Emits attention as single operators, for softcap, sinks or slopes, which ONNX's or TensorRT's operator doesn't
    support.

    Query heads that share a key/value head are rows of one product with its keys.
    """
    kv_heads = int(b.expressions(a["k_cache"])[2])
    if heads != kv_heads:
        q = b.op("Reshape", q, b.integers(0, kv_heads, -1, int(b.expressions(a["q"])[-1])))
    scaled = b.op("Mul", q, b.number(float(a["scale"]), _F32))
    product = b.op("MatMul", scaled, b.op("Transpose", keys, perm=[0, 1, 3, 2]))  # [B, Nkv, g*S, C]
    scores = product if heads == kv_heads else b.op("Reshape", product, _by_heads(b, heads, -1))  # [B, Nq, S, C]
    scores = b.wide(scores)
    if a["softcap"]:
        cap = b.number(float(a["softcap"]), _F32)
        scores = b.op("Mul", b.op("Tanh", b.op("Div", scores, cap)), cap)
    if a["slopes"] is not None:
        slopes = b.reshape(b.cast(a["slopes"], _F32), 1, -1, 1, 1)
        scores = b.op("Add", scores, b.op("Mul", slopes, b.once("distance", lambda: _distance(b, mask))))
    scores = b.op("Where", mask, scores, b.number(float(np.finfo(np.float32).min), _F32))
    if a["sinks"] is None:
        weights = b.op("Softmax", scores, axis=-1)
    else:
        sinks = b.op("Expand", b.reshape(b.cast(a["sinks"], _F32), 1, -1, 1, 1), _by_heads(b, heads, 1))
        weights = b.op("Softmax", b.op("Concat", scores, sinks, axis=-1), axis=-1)
        weights = b.op("Slice", weights, b.integers(0), b.integers(-1), b.integers(-1))
    if heads == kv_heads:
        return b.op("MatMul", weights, values)
    y = b.op("MatMul", b.op("Reshape", weights, b.op("Shape", product)), values)  # [B, Nkv, g*S, Dv]
    return b.op("Reshape", y, _by_heads(b, heads, int(b.expressions(a["v_cache"])[-1])))


def _by_heads(b: GraphBuilder, heads: int, size: int) -> str:
    """Returns a tensor with the shape [B, heads, S, size]."""

    def make() -> str:
        requests = b.once("B", lambda: b.op("Shape", INPUT_IDS, start=0, end=1))
        tokens = b.once("S", lambda: b.op("Shape", INPUT_IDS, start=1, end=2))
        return b.op("Concat", requests, b.integers(heads), tokens, b.integers(size), axis=0)

    return b.once(("by heads", heads, size), make)


def _distance(b: GraphBuilder, mask: str) -> str:
    """Emits the key's position minus the query's, f32 [B, 1, S, C]. A request's first token is at the beginning of its
    slot.
    """
    capacity = b.op("Squeeze", b.op("Shape", mask, start=3, end=4), b.integers(0))
    zero, one = (b.constant(np.asarray(n, np.int64)) for n in (0, 1))
    keys = b.op("Range", zero, capacity, one)  # [C]
    queries = b.op("Unsqueeze", POSITION_IDS, b.integers(1, 3))  # [B, 1, S, 1]
    return b.op("Cast", b.op("Sub", keys, queries), to=TensorProto.FLOAT)


HANDLERS: Mapping[Any, Handler] = {
    ew.kv_write.default: _kv_write,
    ew.paged_attention.default: _paged_attention,
}
