"""The meaning of TensorRT's layers, in numpy: strict about types and ranks, as a strongly typed network is said to be.

Each takes a layer with what was set on it, and its inputs; imports the bindings' enumerations when it is called, for
this is used in a process of its own (see ``tests/plugins/tensorrt/conftest.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


def same_types(kind: str, *arrays: Array) -> None:
    assert len({a.dtype for a in arrays}) == 1, f"{kind} of {[a.dtype for a in arrays]}"


def same_ranks(kind: str, *arrays: Array) -> None:
    assert len({a.ndim for a in arrays}) == 1, f"{kind} of {[a.shape for a in arrays]}"


def _shuffle(layer: Any, x: Array, *sizes: Array) -> Array:
    if layer.first_transpose is not None:
        return np.transpose(x, [layer.first_transpose[i] for i in range(x.ndim)])
    target_shape = sizes[0].tolist() if sizes else [int(n) for n in layer.reshape_dims]
    return x.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(target_shape)])


def _slice(layer: Any, x: Array, *more: Array) -> Array:
    start, size, stride = ([int(n) for n in dims] for dims in layer.arguments)
    if more:
        assert more[-1].dtype == np.int64
        size = more[-1].tolist()
    for axis in range(x.ndim):
        places = start[axis] + np.arange(size[axis]) * stride[axis]
        assert not len(places) or (places.min() >= 0 and places.max() < x.shape[axis]), (x.shape, start, size, stride)
        x = np.take(x, places, axis)
    return x


def _elementwise(layer: Any, x: Array, y: Array) -> Array:
    name = layer.arguments[0].name
    same_types(name, x, y)
    same_ranks(name, x, y)
    if name == "DIV" and x.dtype.kind in "iu":
        return x // y
    functions: dict[str, Callable[[Array, Array], Array]] = {
        **{"SUM": np.add, "SUB": np.subtract, "PROD": np.multiply, "DIV": np.divide, "POW": np.power},
        **{"MAX": np.maximum, "MIN": np.minimum, "AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor},
        **{"LESS": np.less, "GREATER": np.greater, "EQUAL": np.equal},
    }
    if name in ("AND", "OR", "XOR"):
        assert x.dtype == np.bool_, name
    return functions[name](x, y)


def _unary(layer: Any, x: Array) -> Array:
    name = layer.arguments[0].name
    assert (x.dtype == np.bool_) == (name == "NOT"), (name, x.dtype)
    functions: dict[str, Callable[[Array], Array]] = {
        **{"NOT": np.logical_not, "NEG": np.negative, "ABS": np.abs, "EXP": np.exp, "LOG": np.log, "SQRT": np.sqrt},
        **{"SIN": np.sin, "COS": np.cos, "FLOOR": np.floor, "ROUND": np.round, "RECIP": np.reciprocal},
        "ERF": lambda a: torch.erf(torch.from_numpy(a)).numpy(),
    }
    return functions[name](x)


def _activation(layer: Any, x: Array) -> Array:
    tensor = torch.from_numpy(np.ascontiguousarray(x, np.float32))
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        **{"RELU": torch.relu, "SIGMOID": torch.sigmoid, "TANH": torch.tanh},
        "GELU_ERF": torch.nn.functional.gelu,
        "GELU_TANH": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
    }
    return functions[layer.arguments[0].name](tensor).numpy().astype(x.dtype)


def _select(layer: Any, condition: Array, x: Array, y: Array) -> Array:
    assert condition.dtype == np.bool_
    same_types("Select", x, y)
    same_ranks("Select", condition, x, y)
    return np.where(condition, x, y)


def _axes(mask: int, rank: int) -> tuple[int, ...]:
    return tuple(i for i in range(rank) if mask >> i & 1)


def _softmax(layer: Any, x: Array) -> Array:
    (axis,) = _axes(layer.axes, x.ndim)
    shares = np.exp(x - x.max(axis, keepdims=True))
    return (shares / shares.sum(axis, keepdims=True)).astype(x.dtype)


def _reduce(layer: Any, x: Array) -> Array:
    kind, mask, keep = layer.arguments
    reduced = {"SUM": np.sum, "AVG": np.mean, "MAX": np.max}[kind.name](x, axis=_axes(mask, x.ndim), keepdims=keep)
    return np.asarray(reduced).astype(x.dtype)


def _matmul(layer: Any, x: Array, y: Array) -> Array:
    same_types("MatrixMultiply", x, y)
    same_ranks("MatrixMultiply", x, y)
    turned = [a.swapaxes(-1, -2) if kind.name == "TRANSPOSE" else a for a, kind in zip((x, y), layer.arguments)]  # noqa: B905
    return np.asarray(turned[0] @ turned[1])


def _dequantize(layer: Any, x: Array, scales: Array) -> Array:
    if scales.ndim == x.ndim:  # blocks along one axis
        for axis, (n, m) in enumerate(zip(x.shape, scales.shape, strict=True)):
            scales = scales.repeat(n // m, axis)
    elif scales.ndim == 1:
        shape = [1] * x.ndim
        shape[layer.axis] = -1
        scales = scales.reshape(shape)
    return x.astype(scales.dtype) * scales


def _rotary(layer: Any, x: Array, cosines: Array, sines: Array) -> Array:
    """[B,N,S,D], [B,S,R/2]"""
    same_types("RotaryEmbedding", x, cosines, sines)
    assert x.ndim == 4 and cosines.ndim == 3
    interleaved, rotated = layer.arguments
    cos, sin = cosines[:, None], sines[:, None]
    width = rotated or x.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        both = np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(turned.shape)
    else:
        a, b = turned[..., : width // 2], turned[..., width // 2 :]
        both = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return np.concatenate([both, rest], -1)


def _top_k(layer: Any, x: Array) -> tuple[Array, Array]:
    kind, count, mask = layer.arguments
    (axis,) = _axes(mask, x.ndim)
    order = np.argsort(-x if kind.name == "MAX" else x, axis, kind="stable").take(range(count), axis)
    return np.take_along_axis(x, order, axis), order.astype(np.int32)


def _one_hot(layer: Any, places: Array, values: Array, depth: Array) -> Array:
    (axis,) = layer.arguments
    hot = np.expand_dims(places, axis) == np.arange(int(depth)).reshape([-1] + [1] * (places.ndim - axis))
    return np.where(hot, values[1], values[0])


def _scatter(layer: Any, x: Array, places: Array, new: Array) -> Array:
    same_types("Scatter", x, new)
    x = x.copy()
    np.put_along_axis(x, places, new, layer.axis)
    return x


def _concatenation(layer: Any, *tensors: Array) -> Array:
    same_types("Concatenation", *tensors)
    return np.concatenate(tensors, layer.axis)


def _squeezed(x: Array, axes: Array) -> Array:
    return np.squeeze(x, tuple(axes.tolist()))


def _gather(layer: Any, x: Array, places: Array) -> Array:
    assert places.dtype in (np.int32, np.int64)
    return np.take(x, places, layer.arguments[0])


MEANINGS: dict[str, Callable[..., Array | tuple[Array, ...]]] = {
    "constant": lambda layer: layer.arguments[0],
    "cast": lambda layer, x: x.astype(layer.arguments[0]),
    "identity": lambda layer, x: x,
    "shape": lambda layer, x: np.asarray(x.shape, np.int64),
    "shuffle": _shuffle,
    "unsqueeze": lambda layer, x, axes: np.expand_dims(x, tuple(axes.tolist())),
    "squeeze": lambda layer, x, axes: _squeezed(x, axes),
    "concatenation": _concatenation,
    "slice": _slice,
    "gather": _gather,
    "gather_v2": lambda layer, x, places: np.take_along_axis(x, places, layer.axis),
    "scatter": _scatter,
    "one_hot": _one_hot,
    "topk": _top_k,
    "elementwise": _elementwise,
    "unary": _unary,
    "activation": _activation,
    "select": _select,
    "softmax": _softmax,
    "reduce": _reduce,
    "matrix_multiply": _matmul,
    "dequantize": _dequantize,
    "rotary_embedding": _rotary,
}
"""Layers by the name behind ``add_``."""


def unpacked(data: Array, shape: Sequence[int]) -> Array:
    """Integers of 4 bits, two in a byte, the first in its lower half."""
    pairs = np.stack([data & 15, data >> 4], -1).reshape(-1)[: int(np.prod(shape))].astype(np.int8)
    return np.where(pairs > 7, pairs - 16, pairs).astype(np.int8).reshape(shape)
