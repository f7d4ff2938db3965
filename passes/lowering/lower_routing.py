"""What routers are made of: softmax, the greatest few, gather, scatter, comparisons and masks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.runtime.shared.lowered_program import Affine, WeightUse

from ..ir.weights import COMPUTED, Source
from .builder import Builder, Value
from .lower_elementwise import apply
from .lower_ew import Handler
from .views import View, expand, reshape

aten = torch.ops.aten

_ONE = Affine(1)


def constant(b: Builder, value: float, shape: tuple[Affine, ...]) -> View:
    """A tensor of one number, which may be infinite as no attribute can: a weight of one element, broadcast."""
    name = f"constant:{value}"
    if name not in b.sources:
        tensor = torch.tensor([value], dtype=torch.float32)
        b.sources[name] = Source(f"{COMPUTED}{name}", (1,), torch.float32, lambda: tensor)
        b.weights[name] = WeightUse(name=name, dtype="f32", shape=(1,), layout="rows")
    return expand(View("weight", name, "f32", (_ONE,), (_ONE,)), shape)


def _last(b: Builder, node: Node, view: View, dim: int) -> None:
    if dim % max(view.rank, 1) != view.rank - 1:
        raise b.unsupported(f"{b.form.target} has it for the last dimension alone")


def _as(out: View, shape: tuple[Affine, ...]) -> View:
    """A result in the shape that its operands were flattened to."""
    found = reshape(out, shape)
    assert found is not None, f"an output of shape {out.shape} can't be written as {shape}"
    return found


def _rows(b: Builder, view: View) -> View:
    """Rank 1 to 3 with unit inner stride, as the kernels of routers take it."""
    return b.unit(view) if view.rank == 1 else b.rows(view)


def _top_k(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.cast(b.view(a["self"]))
    if not a.get("largest", True):
        raise b.unsupported(f"{b.form.target} has no k least")
    _last(b, node, view, a["dim"])
    x = _rows(b, view)
    outs = [b.buffer(b.shape(node, i), b.dtype(value)) for i, value in enumerate(node.meta["val"])]
    k = int(a["k"])
    b.step("top_k", [x], [_as(o, (*x.shape[:-1], Affine(k))) for o in outs], {"k": k})
    return tuple(outs)


def _max(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    """The greatest, and the first place where it is."""
    view = b.cast(b.view(a["self"]))
    _last(b, node, view, a["dim"])
    x = _rows(b, view)
    outs = [b.buffer(b.shape(node, i), b.dtype(value)) for i, value in enumerate(node.meta["val"])]
    b.step("top_k", [x], [_as(o, (*x.shape[:-1], _ONE)) for o in outs], {"k": 1})
    return tuple(outs)


def _gather(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    x, index = b.view(a["self"]), b.view(a["index"])
    _last(b, node, x, a["dim"])
    if x.shape[:-1] != index.shape[:-1]:
        raise b.unsupported(f"{b.form.target} gathers from as many rows as there are of indices")
    out = b.result(node)
    x, index = _rows(b, x), _rows(b, index)
    b.step("gather", [x, index], [_as(out, (*x.shape[:-1], out.shape[-1]))])
    return out


def _scatter(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    x, index, value = b.cast(b.view(a["self"])), b.view(a["index"]), float(a["value"])
    _last(b, node, x, a["dim"])
    if x.shape[:-1] != index.shape[:-1] or node.meta["val"].dtype not in (torch.float32, torch.bool):
        raise b.unsupported(f"{b.form.target} scatters a number over the rows of as many indices, in floats")
    index = _rows(b, index)

    def scattered(into: View, number: float, out: View) -> View:
        rows = _rows(b, into)
        b.step("scatter", [rows, index], [_as(out, rows.shape)], {"value": number})
        return out

    if math.isfinite(value):
        return scattered(x, value, b.result(node))
    # No attribute is infinite: mark the places, then choose.
    marks = scattered(constant(b, 0.0, x.shape), 1.0, b.buffer(x.shape))
    return apply(b, "where", [marks, constant(b, value, x.shape), x], b.result(node))


def _softmax(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    x = b.cast(b.view(a["self"]))
    _last(b, node, x, a["dim"])
    flat = b.rows(x)
    narrow = (*flat.shape[:-1], _ONE)
    greatest, total = b.buffer(narrow), b.buffer(narrow)
    out = b.result(node)
    b.step("reduce", [flat], [greatest], {"kind": "max"})
    powers = b.buffer(flat.shape)
    apply(b, "sub", [flat, greatest], powers)
    apply(b, "exp", [powers], powers)
    b.step("reduce", [powers], [total], {"kind": "sum"})
    apply(b, "div", [powers, total], _as(out, flat.shape))
    return out


def _masked_fill(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    value = a["value"]
    if not isinstance(value, (int, float)):
        raise b.unsupported(f"{b.form.target} fills with a number alone")
    out = b.result(node)
    if out.dtype != "f32":
        raise b.unsupported(f"{b.form.target} fills floats alone")
    return apply(b, "where", [a["mask"], constant(b, float(value), out.shape), a["self"]], out)


def _clamp(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    """Between bounds that are tensors."""
    value = a["self"]
    for fn, bound in (("maximum", a["min"]), ("minimum", a["max"])):
        if bound is not None:
            value = apply(b, fn, [value, bound], b.buffer(b.shape(node), b.dtype(node.meta["val"])))
    result: Value = value
    return result


def _compare(fn: str) -> Handler:
    def lower(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
        first, second, out = b.view(a["self"]), a["other"], b.result(node)
        number = isinstance(second, (int, float))
        if first.dtype == "i32" and (float(second).is_integer() if number else b.view(second).dtype == "i32"):
            # Compared as integers: floats don't tell large ones apart.
            attrs: dict[str, int | float | bool | str] = {"fn": fn}
            if number:
                attrs |= {"scalar": int(second), "scalar_first": False}
            b.strided_step("elementwise", [first] if number else [first, b.view(second)], out, attrs)
            return out
        return apply(b, fn, [first, second], out)

    return lower


def _logical(fn: str) -> Handler:
    """Of conditions; ``bitwise_not`` and its kind of integers are something else."""

    def lower(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
        arguments = [v for k, v in a.items() if k in ("self", "other")]
        if any(n.meta["val"].dtype != torch.bool for n in node.all_input_nodes):
            raise b.unsupported(f"{b.form.target} has it for conditions alone")
        return apply(b, fn, arguments, b.result(node))

    return lower


def _filled(number: float | None) -> Handler:
    """A tensor of one number."""

    def lower(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
        if b.dtype(node.meta["val"]) != "f32":
            raise b.unsupported(f"{b.form.target} fills floats alone")
        return constant(b, float(a["fill_value"] if number is None else number), b.shape(node))

    return lower


HANDLERS: Mapping[Any, Handler] = {
    aten.topk.default: _top_k,
    aten.max.dim: _max,
    aten.gather.default: _gather,
    aten.scatter.value: _scatter,
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.masked_fill.Scalar: _masked_fill,
    **{getattr(aten, fn).Scalar: _compare(fn) for fn in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{getattr(aten, fn).Tensor: _compare(fn) for fn in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{getattr(aten, fn).default: _logical(fn) for fn in ("logical_and", "logical_or", "logical_not")},
    aten.bitwise_not.default: _logical("logical_not"),
    aten.bitwise_and.Tensor: _logical("logical_and"),
    aten.bitwise_or.Tensor: _logical("logical_or"),
    aten.__and__.Tensor: _logical("logical_and"),
    aten.__or__.Tensor: _logical("logical_or"),
    aten.clamp.Tensor: _clamp,
    aten.zeros_like.default: _filled(0.0),
    aten.ones_like.default: _filled(1.0),
    aten.full_like.default: _filled(None),
}
"""Ops of routers, none of which works along tokens."""
