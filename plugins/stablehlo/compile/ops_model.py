"""Translates the operators of language models: products, norms, rotations, and attention over slots."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from .graph import Cache, Call, Graph, Handler, Scaled
from .module_text import Tensor
from .ops_plain import number, softmax


def _mat_mul(g: Graph, call: Call) -> Tensor:
    """Emits the product of [.., M, K] and [.., K, N], whose leading dimensions are batches."""
    text, x, weight = g.text, g.tensor(call.inputs[0]), g.value(call.inputs[1])
    if isinstance(weight, Scaled) and not weight.block and weight.axis == 1 and len(weight.shape) == 2:
        values = text.convert(g.unpacked(weight), "f32")
        y = (
            _row_product(g, x, values)
            if x.shape[-1] == math.prod(x.shape)
            else text.dot(x, values, (len(x.shape) - 1, 0))
        )
        return text.binary("multiply", y, text.convert(weight.scales, "f32"))
    y = g.tensor(call.inputs[1])
    if len(y.shape) == 2:
        return text.dot(x, y, (len(x.shape) - 1, 0))
    lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x, y = text.broadcast(x, (*lead, *x.shape[-2:])), text.broadcast(y, (*lead, *y.shape[-2:]))
    return text.dot(x, y, (len(lead) + 1, len(lead)), batching=len(lead))


def _row_product(g: Graph, x: Tensor, values: Tensor) -> Tensor:
    """Emits the product of one row [1, K] and [K, N] as a sum. XLA then converts integers while it adds, and stores no
    matrix of floats.
    """
    text, (size, width) = g.text, values.shape
    spread = text.broadcast(text.reshape(x, (size, 1)), values.shape)
    return text.reshape(text.reduce("add", text.binary("multiply", spread, values), [0]), (*x.shape[:-1], width))


def _gemm(g: Graph, call: Call) -> Tensor:
    """Emits the product of x [M, K] and the transpose of a table [N, K]."""
    if not call.get("transB", 0) or call.get("transA", 0) or len(call.inputs) > 2:
        raise g.unsupported("it isn't a product with a table's rows")
    return g.text.dot(g.tensor(call.inputs[0]), g.tensor(call.inputs[1]), (1, 1))


def _dequantize(g: Graph, call: Call) -> Scaled | Tensor:
    """Returns a weight's values and scales without emitting anything; its readers choose how to dequantize them."""
    values, scales = g.tensor(call.inputs[0]), g.tensor(call.inputs[1])
    if len(call.inputs) > 2:
        raise g.unsupported("its weight has zero points")
    bits = 4 if values.kind == "ui8" else 8
    shape = g.dims(call.inputs[0])
    axis = call.get("axis", 1) % len(shape)
    return Scaled(values, scales, axis, call.get("block_size", 0), bits, shape)


def _rms_norm(g: Graph, call: Call) -> Tensor:
    text, x = g.text, g.tensor(call.inputs[0])
    squares = text.reduce("add", text.binary("multiply", x, x), [-1], keep=True)
    mean = text.binary("divide", squares, number(g, x, x.shape[-1]))
    factor = text.unary("rsqrt", text.binary("add", mean, number(g, x, call.get("epsilon", 1e-5))))
    return text.binary("multiply", text.binary("multiply", x, factor), g.tensor(call.inputs[1]))


def _layer_norm(g: Graph, call: Call) -> Tensor:
    text, x = g.text, g.tensor(call.inputs[0])
    size = number(g, x, x.shape[-1])
    mean = text.binary("divide", text.reduce("add", x, [-1], keep=True), size)
    centred = text.binary("subtract", x, mean)
    squares = text.reduce("add", text.binary("multiply", centred, centred), [-1], keep=True)
    variance = text.binary("divide", squares, size)
    factor = text.unary("rsqrt", text.binary("add", variance, number(g, x, call.get("epsilon", 1e-5))))
    y = text.binary("multiply", text.binary("multiply", centred, factor), g.tensor(call.inputs[1]))
    return text.binary("add", y, g.tensor(call.inputs[2])) if len(call.inputs) > 2 else y


def rotation_table(g: Graph, call: Call) -> Tensor:
    """Emits a step's cosines and sines next to each other, [T, 2F].

    They are multiplied by an identity matrix. XLA computes a product once, but would compute cosines, which it counts
    as cheap, again for every layer and element.
    """
    text, names = g.text, call.inputs[1:3]

    def make() -> Tensor:
        halves = [g.tensor(name) for name in names]
        tokens, width = halves[0].shape[0], halves[0].shape[-1]
        joined = text.concatenate([text.reshape(half, (tokens, width)) for half in halves], 1)
        return text.dot(joined, text.constant(np.eye(2 * width, dtype=np.float32)), (1, 0))

    return g.once(("rotation", *names), make)


def _rotary_embedding(g: Graph, call: Call) -> Tensor:
    """Emits the rotation of the first 2F elements of x [T, heads, 1, D] by cosines and sines [T, 1, F].

    Elements of the two halves, or adjacent elements, are rotated together.
    """
    text, x = g.text, g.tensor(call.inputs[0])
    tokens, heads, _, size = x.shape
    width = g.shape(call.inputs[1])[-1]
    table = rotation_table(g, call)
    cosines, sines = (
        text.reshape(text.slice(table, 1, i * width, (i + 1) * width), (tokens, 1, width)) for i in (0, 1)
    )
    flat = text.reshape(x, (tokens, heads, size))
    rotated = text.slice(flat, 2, 0, 2 * width)
    if call.get("interleaved", 0):
        pairs = text.reshape(rotated, (tokens, heads, width, 2))
        halves = [text.reshape(text.slice(pairs, 3, i, i + 1), (tokens, heads, width)) for i in range(2)]
    else:
        halves = [text.slice(rotated, 2, i * width, (i + 1) * width) for i in range(2)]
    first = text.binary(
        "subtract", text.binary("multiply", halves[0], cosines), text.binary("multiply", halves[1], sines)
    )
    second = text.binary("add", text.binary("multiply", halves[0], sines), text.binary("multiply", halves[1], cosines))
    if call.get("interleaved", 0):
        joined = [text.reshape(half, (tokens, heads, width, 1)) for half in (first, second)]
        result = text.reshape(text.concatenate(joined, 3), (tokens, heads, 2 * width))
    else:
        result = text.concatenate([first, second], 2)
    if 2 * width < size:
        result = text.concatenate([result, text.slice(flat, 2, 2 * width, size)], 2)
    return text.reshape(result, x.shape)


def _tensor_scatter(g: Graph, call: Call) -> Cache:
    """Emits the write of each request's keys or values to their positions in its slot. Returns the written cache."""
    text, cache = g.text, g.cache(call.inputs[0])
    update, index = (g.tensor(name) for name in call.inputs[1:])
    rows, (_, heads, tokens, size) = cache.rows, update.shape
    zero = text.constant(np.asarray(0, np.int64))
    for row in range(update.shape[0]):
        one = text.reshape(text.slice(update, 0, row, row + 1), (heads, tokens, size))
        place = text.reshape(text.slice(index, 0, row, row + 1), ())
        first = text.constant(np.asarray(row * heads, np.int64))
        rows = text.dynamic_update_slice(rows, one, [first, place, zero])
    return Cache(rows, cache.shape)


def _attention(g: Graph, call: Call) -> Tensor:
    """Emits attention of q [B, Nq, S, D] over keys and values [B, Nkv, C, D], with a mask [B, 1, S, C].

    Query heads that share a key/value head are rows of one product.
    """
    text = g.text
    q, mask = (g.tensor(call.inputs[i]) for i in (0, 3))
    keys, values = (g.cache(call.inputs[i]).rows for i in (1, 2))
    requests, heads, tokens, size = q.shape
    batch, places, _ = keys.shape
    q = text.binary("multiply", q, number(g, q, call.get("scale")))
    q = text.reshape(q, (batch, -1, size))
    scores = text.dot(q, keys, (2, 2), batching=1)  # [B*Nkv, g*S, C]
    scores = text.reshape(scores, (requests, heads, tokens, places))
    scores = text.select(mask, scores, number(g, scores, float(np.finfo(np.float32).min)))
    weights = text.reshape(softmax(g, scores, -1), (batch, -1, places))
    y = text.dot(weights, values, (2, 1), batching=1)
    return text.reshape(y, (requests, heads, tokens, values.shape[-1]))


HANDLERS: Mapping[str, Handler] = {
    "MatMul": _mat_mul,
    "Gemm": _gemm,
    "DequantizeLinear": _dequantize,
    "RMSNormalization": _rms_norm,
    "LayerNormalization": _layer_norm,
    "RotaryEmbedding": _rotary_embedding,
    "TensorScatter": _tensor_scatter,
    "Attention": _attention,
}
