"""Lowers view-like ATen ops to strides and offsets, without steps. If strides can't express a view, it becomes a
copy.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.aten_ops import dimension_order, dims_of, of_each
from enginewright.passes.framework.match import bound_arguments
from enginewright.runtime.shared.lowered_program import Affine

from .builder import NARROW, Builder, Value
from .lower_elementwise import apply
from .lower_ew import Handler
from .lower_quantized import cast_bf16
from .views import View, expand, permute, select, slice_view


def _reshape(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    return b.reshaped(b.view(a["self"]), b.shape(node))


def _same(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    value: Value = a["self"]
    return value


def _convert(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    value = a["self"]
    if isinstance(value, (int, float)):
        return value
    before, to = node.all_input_nodes[0].meta["val"].dtype, b.dtype(node.meta["val"])
    if node.meta["val"].dtype == torch.bool != before:
        return apply(b, "ne", [value, 0], b.buffer(b.shape(node)))
    if b.dtype(torch.empty((), dtype=before, device="meta")) == to:
        converted: Value = value
        return converted
    if before == torch.float32 and to == "bf16":
        return cast_bf16(b, node, b.view(value))
    if to in NARROW:
        raise b.unsupported(f"{b.form.target} doesn't compute in {str(node.meta['val'].dtype).removeprefix('torch.')}")
    if to != "f32":
        raise b.unsupported(f"{b.form.target} doesn't round floats to integers")
    return b.cast(b.view(value))


def _permute(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.view(a["self"])
    return permute(view, dimension_order(a, view.rank))


def _unsqueeze(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.view(a["self"])
    dim = a["dim"] % (view.rank + 1)
    # The stride of a size of 1 is never stepped; the next one's product keeps dense views dense.
    stride = view.strides[dim] * view.shape[dim] if dim < view.rank else Affine(1)
    return replace(
        view,
        shape=(*view.shape[:dim], Affine(1), *view.shape[dim:]),
        strides=(*view.strides[:dim], stride, *view.strides[dim:]),
    )


def _squeeze(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.view(a["self"])
    chosen = dims_of(a, view.rank)
    keep = [d for d in range(view.rank) if d not in chosen or view.shape[d] != 1]
    return permute(view, keep)


def _expand(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    return expand(b.view(a["self"]), b.shape(node))


def _slice(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.view(a["self"])
    dim = a["dim"] % view.rank
    start = _index(b, a["start"] or 0, view.shape[dim])
    return slice_view(view, dim, start, b.shape(node)[dim], a["step"])


def _select(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.view(a["self"])
    dim = a["dim"] % view.rank
    return select(view, dim, _index(b, a["index"], view.shape[dim]))


def _index(b: Builder, index: Any, size: Affine) -> Affine:
    """Returns an index along a dimension of size ``size`` as an affine expression.

    Negative indices count from the end, and larger ones than ``size`` become ``size``.
    """
    if not isinstance(index, int):
        return Affine.parse(index)
    if index < 0:
        return size + index
    if size.is_constant:
        return Affine(min(index, size.constant))
    return Affine(index)


def _split(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.view(a["self"])
    dim = a["dim"] % view.rank
    parts, at = [], Affine()
    for i in range(len(node.meta["val"])):
        size = b.shape(node, i)[dim]
        parts.append(slice_view(view, dim, at, size))
        at = at + size
    return tuple(parts)


def _unbind(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.view(a["self"])
    dim = a["dim"] % view.rank
    return tuple(select(view, dim, Affine(i)) for i in range(len(node.meta["val"])))


def _getitem(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    values, index = a["0"], a["1"]
    assert isinstance(values, tuple) and isinstance(index, int)
    one: Value = values[index]
    return one


def _cat(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    out = b.result(node)
    for value, place in zip(a["tensors"], cat_places(b, node, out), strict=True):
        view = b.view(value)
        if view != place:  # else its producer wrote it there
            b.copy(_as_type(b, view, out), place)
    return out


def _as_type(b: Builder, view: View, like: View) -> View:
    return b.cast(view) if like.dtype == "f32" else view


def cat_places(b: Builder, node: Node, out: View) -> list[View]:
    """Returns for each argument of a concatenation its part of the result's buffer ``out``."""
    arguments = bound_arguments(node)
    dim = arguments["dim"] % out.rank
    places, at = [], Affine()
    for tensor in arguments["tensors"]:
        size = b.shape(tensor)[dim]
        places.append(slice_view(out, dim, at, size))
        at = at + size
    return places


HANDLERS: Mapping[Any, Handler] = {
    **of_each(
        {
            "reshape": _reshape,
            "same": _same,
            "convert": _convert,
            "permute": _permute,
            "unsqueeze": _unsqueeze,
            "squeeze": _squeeze,
            "expand": _expand,
            "slice": _slice,
            "select": _select,
            "split": _split,
            "unbind": _unbind,
            "cat": _cat,
        }
    ),
    operator.getitem: _getitem,
}
