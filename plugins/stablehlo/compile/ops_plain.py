"""Translates element-wise operators, operators that move data, and reductions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .graph import KINDS, Call, Graph, Handler
from .module_text import KINDS as KINDS_OF_NUMPY
from .module_text import NUMPY, Array, Tensor

_KNOWN: Mapping[str, Any] = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply}


def _binary(op: str) -> Handler:
    def emit(g: Graph, call: Call) -> Tensor | Array:
        a, b = (g.value(name) for name in call.inputs)
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and call.kind in _KNOWN:
            result: Array = np.asarray(_KNOWN[call.kind](a, b))
            return result
        return g.text.binary(op, *(g.tensor(name) for name in call.inputs))

    return emit


def _unary(op: str) -> Handler:
    def emit(g: Graph, call: Call) -> Tensor:
        return g.text.unary(op, g.tensor(call.inputs[0]))

    return emit


def _compare(direction: str) -> Handler:
    def emit(g: Graph, call: Call) -> Tensor:
        return g.text.compare(direction, *(g.tensor(name) for name in call.inputs))

    return emit


def _where(g: Graph, call: Call) -> Tensor:
    return g.text.select(*(g.tensor(name) for name in call.inputs))


def number(g: Graph, x: Tensor, value: float) -> Tensor:
    """Returns the scalar constant ``value`` in the element type of ``x``."""
    return g.text.constant(np.asarray(value, NUMPY[x.kind]), x.kind)


def _reciprocal(g: Graph, call: Call) -> Tensor:
    x = g.tensor(call.inputs[0])
    return g.text.binary("divide", number(g, x, 1), x)


def _relu(g: Graph, call: Call) -> Tensor:
    x = g.tensor(call.inputs[0])
    return g.text.binary("maximum", x, number(g, x, 0))


_ERF_ABOVE: tuple[float, ...] = (
    *(-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05),
    *(-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
)
_ERF_BELOW: tuple[float, ...] = (
    *(-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03),
    -1.42647390514189e-02,
)
"""The coefficients of Q in x P(x^2) / Q(x^2), the rational approximation of erf that Eigen and XLA use for 32-bit
floats.
"""


def _erf_of(g: Graph, x: Tensor) -> Tensor:
    text = g.text
    x = text.binary("maximum", text.binary("minimum", x, number(g, x, 4)), number(g, x, -4))
    square = text.binary("multiply", x, x)

    def polynomial(coefficients: tuple[float, ...]) -> Tensor:
        total = number(g, x, coefficients[0])
        for coefficient in coefficients[1:]:
            total = text.binary("add", text.binary("multiply", total, square), number(g, x, coefficient))
        return total

    return text.binary("divide", text.binary("multiply", x, polynomial(_ERF_ABOVE)), polynomial(_ERF_BELOW))


def _erf(g: Graph, call: Call) -> Tensor:
    return _erf_of(g, g.tensor(call.inputs[0]))


def _gelu(g: Graph, call: Call) -> Tensor:
    text, x = g.text, g.tensor(call.inputs[0])
    half = text.binary("multiply", x, number(g, x, 0.5))
    if call.get("approximate", b"none") == b"tanh":
        cube = text.binary("multiply", text.binary("multiply", x, x), x)
        inner = text.binary("add", x, text.binary("multiply", cube, number(g, x, 0.044715)))
        bend = text.unary("tanh", text.binary("multiply", inner, number(g, x, math.sqrt(2 / math.pi))))
    else:
        bend = _erf_of(g, text.binary("multiply", x, number(g, x, math.sqrt(0.5))))
    return text.binary("multiply", half, text.binary("add", bend, number(g, x, 1)))


def _cast(g: Graph, call: Call) -> Tensor | Array:
    kind, value = KINDS[call.get("to")], g.value(call.inputs[0])
    if isinstance(value, np.ndarray):
        return value.astype(NUMPY[kind])
    return g.text.convert(g.tensor(call.inputs[0]), kind)


# ---- what moves


def _shape(g: Graph, call: Call) -> Array:
    sizes = g.shape(call.inputs[0])
    return np.asarray(sizes[call.get("start", 0) : call.get("end", len(sizes))], np.int64)


def _reshape(g: Graph, call: Call) -> Tensor | Array:
    value, requested = g.value(call.inputs[0]), g.integers(call.inputs[1])
    sizes = [g.shape(call.inputs[0])[i] if size == 0 else size for i, size in enumerate(requested)]
    return value.reshape(sizes) if isinstance(value, np.ndarray) else g.text.reshape(g.tensor(call.inputs[0]), sizes)


def _axes(g: Graph, call: Call, rank: int) -> list[int]:
    return sorted(axis % rank for axis in g.integers(call.inputs[1]))


def _unsqueeze(g: Graph, call: Call) -> Tensor | Array:
    value, shape = g.value(call.inputs[0]), list(g.shape(call.inputs[0]))
    for axis in _axes(g, call, len(shape) + len(g.integers(call.inputs[1]))):
        shape.insert(axis, 1)
    return value.reshape(shape) if isinstance(value, np.ndarray) else g.text.reshape(g.tensor(call.inputs[0]), shape)


def _squeeze(g: Graph, call: Call) -> Tensor | Array:
    value, shape = g.value(call.inputs[0]), g.shape(call.inputs[0])
    gone = _axes(g, call, len(shape))
    sizes = [size for i, size in enumerate(shape) if i not in gone]
    return value.reshape(sizes) if isinstance(value, np.ndarray) else g.text.reshape(g.tensor(call.inputs[0]), sizes)


def _transpose(g: Graph, call: Call) -> Tensor:
    return g.text.transpose(g.tensor(call.inputs[0]), call.get("perm"))


def _concat(g: Graph, call: Call) -> Tensor | Array:
    values = [g.value(name) for name in call.inputs]
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    axis = call.get("axis")
    if len(arrays) == len(values):
        return np.concatenate(arrays, axis)
    parts = [g.tensor(name) for name in call.inputs]
    return g.text.concatenate(parts, axis % len(parts[0].shape))


def _slice(g: Graph, call: Call) -> Tensor | Array:
    value, shape = g.value(call.inputs[0]), g.shape(call.inputs[0])
    sliced = value if isinstance(value, np.ndarray) else g.tensor(call.inputs[0])
    starts, ends = g.integers(call.inputs[1]), g.integers(call.inputs[2])
    axes = g.integers(call.inputs[3]) if len(call.inputs) > 3 else list(range(len(starts)))
    steps = g.integers(call.inputs[4]) if len(call.inputs) > 4 else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= len(shape)
        first, last, stride = slice(start, end, step).indices(shape[axis])
        if isinstance(sliced, np.ndarray):
            sliced = sliced[(slice(None),) * axis + (slice(first, last, stride),)]
        else:
            sliced = g.text.slice(sliced, axis, first, last, stride)
    return sliced


def _split(g: Graph, call: Call) -> tuple[Tensor, ...]:
    x, sizes = g.tensor(call.inputs[0]), g.integers(call.inputs[1])
    axis, ends = call.get("axis", 0) % len(x.shape), np.cumsum(sizes).tolist()
    return tuple(g.text.slice(x, axis, end - size, end) for size, end in zip(sizes, ends, strict=True))


def _expand(g: Graph, call: Call) -> Tensor:
    x = g.tensor(call.inputs[0])
    return g.text.broadcast(x, np.broadcast_shapes(x.shape, tuple(g.integers(call.inputs[1]))))


def _pad(g: Graph, call: Call) -> Tensor:
    x, sizes = g.tensor(call.inputs[0]), g.integers(call.inputs[1])
    if any(sizes[: len(x.shape)]):
        raise g.unsupported("it pads in front")
    return g.text.pad(x, sizes[len(x.shape) :])


def _range(g: Graph, call: Call) -> Array:
    start, stop, step = (int(g.known(name)) for name in call.inputs)
    return np.arange(start, stop, step, dtype=np.int64)


def _gather(g: Graph, call: Call) -> Tensor | Array:
    value, indices = g.value(call.inputs[0]), g.value(call.inputs[1])
    axis = call.get("axis", 0) % len(g.shape(call.inputs[0]))
    if isinstance(indices, np.ndarray) and isinstance(value, np.ndarray):
        return np.asarray(np.take(value, indices, axis))
    x = g.tensor(call.inputs[0])
    if isinstance(indices, np.ndarray) and not indices.shape:
        place = int(indices) % x.shape[axis]
        one = g.text.slice(x, axis, place, place + 1)
        return g.text.reshape(one, [*x.shape[:axis], *x.shape[axis + 1 :]])
    return g.text.take(x, g.tensor(call.inputs[1]), axis)


# ---- what reduces


def _reduce(op: str, mean: bool = False) -> Handler:
    def emit(g: Graph, call: Call) -> Tensor:
        x = g.tensor(call.inputs[0])
        axes = g.integers(call.inputs[1]) if len(call.inputs) > 1 else list(range(len(x.shape)))
        total = g.text.reduce(op, x, axes, keep=bool(call.get("keepdims", 1)))
        return g.text.binary("divide", total, number(g, x, math.prod(x.shape[a] for a in axes))) if mean else total

    return emit


def softmax(g: Graph, x: Tensor, axis: int) -> Tensor:
    """Emits exp(x - max) divided by its sum along an axis, and returns the result."""
    text = g.text
    raised = text.unary("exponential", text.binary("subtract", x, text.reduce("maximum", x, [axis], keep=True)))
    return text.binary("divide", raised, text.reduce("add", raised, [axis], keep=True))


def _softmax(g: Graph, call: Call) -> Tensor:
    return softmax(g, g.tensor(call.inputs[0]), call.get("axis", -1))


# ---- routers


def _one_hot(g: Graph, call: Call) -> Tensor:
    """Emits a one-hot encoding along a new last axis."""
    ids, depth, (off, on) = g.tensor(call.inputs[0]), int(g.known(call.inputs[1])), g.known(call.inputs[2])
    text, places = g.text, (*[1] * len(g.shape(call.inputs[0])), depth)
    hit = text.compare("EQ", text.reshape(ids, (*ids.shape, 1)), text.iota(places, len(places) - 1, ids.kind))
    kind = KINDS_OF_NUMPY[g.known(call.inputs[2]).dtype]
    return text.select(hit, text.constant(on, kind), text.constant(off, kind))


def _top_k(g: Graph, call: Call) -> tuple[Tensor, Tensor]:
    """Emits the k largest values in descending order, and their indices. Among equal values the lower index comes
    first.
    """
    x, (count,) = g.tensor(call.inputs[0]), g.integers(call.inputs[1])
    axis = call.get("axis", -1) % len(x.shape)
    if not call.get("largest", 1):
        raise g.unsupported("it wants the least")
    # IREE makes its own top_k of this, whose places have 32 bits.
    values, places = g.text.sort(x, g.text.iota(x.shape, axis, "i32"), axis)
    return g.text.slice(values, axis, 0, count), g.text.convert(g.text.slice(places, axis, 0, count), "i64")


def _hits(g: Graph, x: Tensor, index: Tensor, axis: int) -> tuple[Tensor, int]:
    """Returns a mask i1 [.., k, n] that is True where an index in ``index`` [.., k] equals a position along the axis,
    and the mask's last dimension.
    """
    text = g.text
    if axis != len(x.shape) - 1 or index.shape[:-1] != x.shape[:-1]:
        raise g.unsupported("it isn't along the last axis")
    places = text.iota((*[1] * len(x.shape), x.shape[-1]), len(x.shape), index.kind)
    return text.compare("EQ", text.reshape(index, (*index.shape, 1)), places), len(x.shape)


def _gather_elements(g: Graph, call: Call) -> Tensor:
    """Emits a gather as a sum in which all terms but one are 0. That is fast along a short axis, as in routers."""
    x, index = (g.tensor(name) for name in call.inputs)
    hits, _ = _hits(g, x, index, call.get("axis", 0) % len(x.shape))
    rows = g.text.reshape(x, (*x.shape[:-1], 1, x.shape[-1]))
    return g.text.reduce("add", g.text.select(hits, rows, number(g, x, 0)), [len(x.shape)])


def _scatter_elements(g: Graph, call: Call) -> Tensor:
    """Emits a write of one number to every indexed position."""
    x, index, updates = (g.tensor(name) for name in call.inputs)
    hits, _ = _hits(g, x, index, call.get("axis", 0) % len(x.shape))
    counted = g.text.reduce("add", g.text.convert(hits, "i32"), [len(x.shape) - 1])  # [.., n]
    hit = g.text.convert(counted, "i1")
    first = g.text.slice(updates, len(updates.shape) - 1, 0, 1)  # all of them are the same
    return g.text.select(hit, first, x)


HANDLERS: Mapping[str, Handler] = {
    **{kind: _binary(op) for kind, op in (("Add", "add"), ("Sub", "subtract"), ("Mul", "multiply"), ("Div", "divide"))},
    **{kind: _binary(op) for kind, op in (("Pow", "power"), ("Max", "maximum"), ("Min", "minimum"))},
    **{kind: _binary(op) for kind, op in (("And", "and"), ("Or", "or"), ("BitwiseAnd", "and"))},
    "BitShift": _binary("shift_right_logical"),
    **{kind: _unary(op) for kind, op in (("Neg", "negate"), ("Abs", "abs"), ("Exp", "exponential"), ("Log", "log"))},
    **{kind: _unary(op) for kind, op in (("Sqrt", "sqrt"), ("Sin", "sine"), ("Cos", "cosine"), ("Tanh", "tanh"))},
    **{kind: _unary(op) for kind, op in (("Floor", "floor"), ("Round", "round_nearest_even"), ("Not", "not"))},
    "Sigmoid": _unary("logistic"),
    **{kind: _compare(way) for kind, way in (("Less", "LT"), ("LessOrEqual", "LE"), ("Greater", "GT"))},
    **{kind: _compare(way) for kind, way in (("GreaterOrEqual", "GE"), ("Equal", "EQ"))},
    "Where": _where,
    "Reciprocal": _reciprocal,
    "Relu": _relu,
    "Erf": _erf,
    "Gelu": _gelu,
    "Cast": _cast,
    "Identity": lambda g, call: g.value(call.inputs[0]),
    "Shape": _shape,
    "Reshape": _reshape,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Concat": _concat,
    "Slice": _slice,
    "Split": _split,
    "Expand": _expand,
    "Pad": _pad,
    "Range": _range,
    "Gather": _gather,
    "ReduceSum": _reduce("add"),
    "ReduceMean": _reduce("add", mean=True),
    "ReduceMax": _reduce("maximum"),
    "Softmax": _softmax,
    "OneHot": _one_hot,
    "TopK": _top_k,
    "GatherElements": _gather_elements,
    "ScatterElements": _scatter_elements,
}
