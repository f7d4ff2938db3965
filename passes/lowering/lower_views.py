"""View-like ATen ops: strides and offsets change, no step is made. Those that strides can't express become copies."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.runtime.shared.lowered_program import Affine

from .builder import NARROW, Builder, Value
from .lower_elementwise import apply
from .lower_ew import Handler
from .lower_quantized import cast_bf16
from .views import View, expand, permute, select, slice_view

aten = torch.ops.aten


def _reshape(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    return b.reshaped(b.view(_first(a)), b.shape(node))


def _same(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    value: Value = _first(a)
    return value


def _convert(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    value = _first(a)
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


def _transpose(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.view(_first(a))
    order = list(range(view.rank))
    i, j = (a["dim0"] % view.rank, a["dim1"] % view.rank) if "dim0" in a else (0, view.rank - 1)
    if view.rank:
        order[i], order[j] = order[j], order[i]
    return permute(view, order)


def _permute(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.view(_first(a))
    return permute(view, [d % view.rank for d in a["dims"]])


def _unsqueeze(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.view(_first(a))
    dim = a["dim"] % (view.rank + 1)
    # The stride of a size of 1 is never stepped; the next one's product keeps dense views dense.
    stride = view.strides[dim] * view.shape[dim] if dim < view.rank else Affine(1)
    return replace(
        view,
        shape=(*view.shape[:dim], Affine(1), *view.shape[dim:]),
        strides=(*view.strides[:dim], stride, *view.strides[dim:]),
    )


def _squeeze(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.view(_first(a))
    dims = a.get("dim", list(range(view.rank)))
    chosen = {d % view.rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])}
    keep = [d for d in range(view.rank) if d not in chosen or view.shape[d] != 1]
    return permute(view, keep)


def _expand(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    return expand(b.view(_first(a)), b.shape(node))


def _slice(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.view(_first(a))
    dim = a["dim"] % view.rank
    start = _index(b, a["start"] or 0, view.shape[dim])
    return slice_view(view, dim, start, b.shape(node)[dim], a["step"])


def _select(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.view(_first(a))
    dim = a["dim"] % view.rank
    return select(view, dim, _index(b, a["index"], view.shape[dim]))


def _index(b: Builder, index: Any, size: Affine) -> Affine:
    """A place along a dimension of ``size``; negative ones count from its end, and none lies beyond it."""
    if not isinstance(index, int):
        return Affine.of(index)
    if index < 0:
        return size + index
    if size.is_constant:
        return Affine(min(index, size.constant))
    return Affine(index)


def _split(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.view(_first(a))
    dim = a.get("dim", 0) % view.rank
    parts, at = [], Affine()
    for i in range(len(node.meta["val"])):
        size = b.shape(node, i)[dim]
        parts.append(slice_view(view, dim, at, size))
        at = at + size
    return tuple(parts)


def _unbind(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.view(_first(a))
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
    """The part of a cat's buffer that each of its arguments fills."""
    tensors = node.args[0]
    assert isinstance(tensors, (list, tuple))
    dim = int(node.args[1]) % out.rank if len(node.args) > 1 else int(node.kwargs.get("dim", 0)) % out.rank  # type: ignore[arg-type]
    places, at = [], Affine()
    for tensor in tensors:
        assert isinstance(tensor, Node)
        size = b.shape(tensor)[dim]
        places.append(slice_view(out, dim, at, size))
        at = at + size
    return places


def _first(a: Mapping[str, Any]) -> Any:
    return next(iter(a.values()))


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
}
