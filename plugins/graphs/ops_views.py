"""Emits ATen ops that only move data: views, slices, concatenations; and tensors with one repeated number."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import sympy
from torch.fx.node import Node

from enginewright.passes.framework.aten_ops import dimension_order, dims_of, of_each

from .graph import GraphBuilder, Handler, Value


def _rank(value: Node) -> int:
    rank: int = value.meta["val"].dim()
    return rank


def _reshape(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    return b.op("Reshape", b.value(a["self"]), b.shape(b.expressions(node)))


def _same(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    return b.value(a["self"])


def _convert(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    """Emits a conversion of types. In the graph, all float types are one type, and all integer types another."""
    return b.cast(a["self"], node.meta["val"].dtype)


def _permute(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    source = a["self"]
    order = dimension_order(a, _rank(source))
    return b.op("Transpose", b.value(source), perm=order) if order else b.value(source)


def _unsqueeze(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    source = a["self"]
    return b.op("Unsqueeze", b.value(source), b.integers(a["dim"] % (_rank(source) + 1)))


def _squeeze(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    source = a["self"]
    gone = [d for d in dims_of(a, _rank(source)) if b.expressions(source)[d] == 1]
    return b.op("Squeeze", b.value(source), b.integers(*gone)) if gone else b.value(source)


def _expand(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    source = a["self"]
    before, after = b.expressions(source), b.expressions(node)
    added = len(after) - len(before)
    # 1 leaves a size as it is, so that what is as large already needs no number of tokens.
    sizes = [sympy.S.One if i >= added and before[i - added] == s else s for i, s in enumerate(after)]
    return b.op("Expand", b.value(source), b.shape(sizes, free=False))


def _slice(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    source = a["self"]
    dim = a["dim"] % _rank(source)
    start, stop = (_bound(b, a[name], default) for name, default in (("start", 0), ("end", _END)))
    axis = b.integers(dim - _rank(source))
    return b.op("Slice", b.value(source), start, stop, axis, b.integers(a["step"]))


_END = np.iinfo(np.int64).max


def _bound(b: GraphBuilder, value: Any, default: int) -> str:
    if value is None:
        return b.integers(default)
    return b.integers(value) if isinstance(value, int) else b.size(b.program.expression(value.meta["val"]))


def _select(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    source = a["self"]
    if not isinstance(a["index"], int):
        raise b.unsupported("the onnx target selects a fixed place")
    index = b.constant(np.asarray(a["index"], np.int64))
    return b.op("Gather", b.value(source), index, axis=a["dim"] % _rank(source))


def _split(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
    source = a["self"]
    dim = a["dim"] % _rank(source)
    sizes = [b.expressions(node, i)[dim] for i in range(len(node.meta["val"]))]
    if len(sizes) == 1:
        return (b.value(source),)
    lengths = b.shape(sizes, free=False)
    return b.ops("Split", (b.value(source), lengths), len(sizes), axis=dim - _rank(source))


def _unbind(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
    source = a["self"]
    dim = a["dim"] % _rank(source)
    places = range(len(node.meta["val"]))
    return tuple(b.op("Gather", b.value(source), b.constant(np.asarray(i, np.int64)), axis=dim) for i in places)


def _getitem(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    values, index = b.names[a["0"]], a["1"]
    assert isinstance(values, tuple) and isinstance(index, int)
    return values[index]


def _cat(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    dim = a["dim"] % _rank(node)
    values = [b.cast(v, node.meta["val"].dtype) for v in a["tensors"]]
    return b.op("Concat", *values, axis=dim - _rank(node)) if len(values) > 1 else values[0]


def _filled(number: float | None) -> Handler:
    """Returns a handler that emits a tensor filled with ``number``; None takes the number from the op's arguments."""

    def emit(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
        value = b.number(a["s"] if "s" in a else a["fill_value"] if number is None else number, node.meta["val"].dtype)
        sizes = b.expressions(node)
        return b.op("Expand", value, b.shape(sizes, free=False)) if sizes else value

    return emit


_BY_NAME = (
    *(_reshape, _same, _convert, _permute, _unsqueeze, _squeeze),
    *(_expand, _slice, _select, _split, _unbind, _cat),
)
"""The handlers in this file, by the names of ``SPELLINGS``."""

HANDLERS: Mapping[Any, Handler] = {
    **of_each(
        {
            **{handler.__name__.removeprefix("_"): handler for handler in _BY_NAME},
            **dict.fromkeys(("full", "full_like"), _filled(None)),
            "zeros_like": _filled(0.0),
            "ones_like": _filled(1.0),
        }
    ),
    operator.getitem: _getitem,
}
