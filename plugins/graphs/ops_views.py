"""ATen ops that only move: views, slices, concatenations, and tensors of one number."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import sympy
import torch
from torch.fx.node import Node

from .graph import GraphBuilder, Handler, Value

aten = torch.ops.aten


def _first(a: Mapping[str, Any]) -> Any:
    return next(iter(a.values()))


def _rank(value: Node) -> int:
    rank: int = value.meta["val"].dim()
    return rank


def _reshape(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    return b.op("Reshape", b.value(_first(a)), b.shape(b.expressions(node)))


def _same(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    return b.value(_first(a))


def _convert(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    """Floats of any width are one type in the graph, and so are integers."""
    return b.cast(_first(a), node.meta["val"].dtype)


def _transpose(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    source = _first(a)
    rank = _rank(source)
    if not rank:
        return b.value(source)
    order = list(range(rank))
    i, j = (a["dim0"] % rank, a["dim1"] % rank) if "dim0" in a else (0, rank - 1)
    order[i], order[j] = order[j], order[i]
    return b.op("Transpose", b.value(source), perm=order)


def _permute(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    source = _first(a)
    return b.op("Transpose", b.value(source), perm=[d % _rank(source) for d in a["dims"]])


def _unsqueeze(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    source = _first(a)
    return b.op("Unsqueeze", b.value(source), b.integers(a["dim"] % (_rank(source) + 1)))


def _squeeze(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    source = _first(a)
    rank = _rank(source)
    dims = a.get("dim", list(range(rank)))
    chosen = {d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])}
    gone = [d for d in sorted(chosen) if b.expressions(source)[d] == 1]
    return b.op("Squeeze", b.value(source), b.integers(*gone)) if gone else b.value(source)


def _expand(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    source = _first(a)
    before, after = b.expressions(source), b.expressions(node)
    added = len(after) - len(before)
    # 1 leaves a size as it is, so that what is as large already needs no number of tokens.
    sizes = [sympy.S.One if i >= added and before[i - added] == s else s for i, s in enumerate(after)]
    return b.op("Expand", b.value(source), b.shape(sizes, free=False))


def _slice(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    source = _first(a)
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
    source = _first(a)
    if not isinstance(a["index"], int):
        raise b.unsupported("the onnx target selects a fixed place")
    index = b.constant(np.asarray(a["index"], np.int64))
    return b.op("Gather", b.value(source), index, axis=a["dim"] % _rank(source))


def _split(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
    source = _first(a)
    dim = a.get("dim", 0) % _rank(source)
    sizes = [b.expressions(node, i)[dim] for i in range(len(node.meta["val"]))]
    if len(sizes) == 1:
        return (b.value(source),)
    given = b.shape(sizes, free=False)
    return b.ops("Split", (b.value(source), given), len(sizes), axis=dim - _rank(source))


def _unbind(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
    source = _first(a)
    dim = a["dim"] % _rank(source)
    places = range(len(node.meta["val"]))
    return tuple(b.op("Gather", b.value(source), b.constant(np.asarray(i, np.int64)), axis=dim) for i in places)


def _getitem(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    values, index = b.names[a["0"]], a["1"]
    assert isinstance(values, tuple) and isinstance(index, int)
    return values[index]


def _cat(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    dim = a.get("dim", 0) % _rank(node)
    values = [b.cast(v, node.meta["val"].dtype) for v in a["tensors"]]
    return b.op("Concat", *values, axis=dim - _rank(node)) if len(values) > 1 else values[0]


def _filled(number: float | None) -> Handler:
    """A tensor of one number."""

    def emit(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
        value = b.number(a["s"] if "s" in a else a["fill_value"] if number is None else number, node.meta["val"].dtype)
        sizes = b.expressions(node)
        return b.op("Expand", value, b.shape(sizes, free=False)) if sizes else value

    return emit


HANDLERS: Mapping[Any, Handler] = {
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), _reshape),
    **dict.fromkeys((aten.flatten.using_ints, aten.unflatten.int), _reshape),
    **dict.fromkeys((aten.alias.default, aten.detach.default, aten.clone.default, aten.contiguous.default), _same),
    aten.lift_fresh_copy.default: _same,
    **dict.fromkeys((aten._to_copy.default, aten.to.dtype), _convert),
    **dict.fromkeys((aten.transpose.int, aten.t.default), _transpose),
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _squeeze),
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default), _split),
    aten.unbind.int: _unbind,
    operator.getitem: _getitem,
    aten.cat.default: _cat,
    **dict.fromkeys((aten.scalar_tensor.default, aten.full.default, aten.full_like.default), _filled(None)),
    aten.zeros_like.default: _filled(0.0),
    aten.ones_like.default: _filled(1.0),
}
