"""Lowers the ops with which routers choose experts: softmax, top-k, gather, scatter, comparisons and masks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.aten_ops import of_each
from enginewright.runtime.shared.lowered_program import Affine, WeightUse

from ..ir.weights import COMPUTED, Source
from .builder import Builder, Value
from .lower_elementwise import apply
from .lower_ew import Handler
from .views import View, expand, reshape

_ONE = Affine(1)


def constant(b: Builder, value: float, shape: tuple[Affine, ...]) -> View:
    """Returns a tensor of one number, as a weight of one element that is broadcast to ``shape``.

    An attribute can't hold the number, as it may be infinite.
    """
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
    """Returns the output ``out`` with the flattened shape ``shape`` of its operands."""
    reshaped = reshape(out, shape)
    assert reshaped is not None, f"an output of shape {out.shape} can't be written as {shape}"
    return reshaped


def _rows(b: Builder, view: View) -> View:
    """Returns a view with 1 to 3 dimensions, the last with stride 1, as the kernels of routers read it."""
    return b.unit(view) if view.rank == 1 else b.rows(view)


def _top_k(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    view = b.cast(b.view(a["self"]))
    if not a["largest"]:
        raise b.unsupported(f"{b.form.target} has no k least")
    _last(b, node, view, a["dim"])
    x = _rows(b, view)
    outs = b.results(node)
    k = int(a["k"])
    b.step("top_k", [x], [_as(o, (*x.shape[:-1], Affine(k))) for o in outs], {"k": k})
    return tuple(outs)


def _max(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    """Lowers a maximum along a dimension to the largest value and its first index."""
    view = b.cast(b.view(a["self"]))
    _last(b, node, view, a["dim"])
    x = _rows(b, view)
    outs = b.results(node)
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
    """Lowers a clamp whose bounds are tensors."""
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
    """Returns a handler that lowers an op on booleans to the function ``fn``.

    It rejects ``bitwise_not`` and similar ops on integers.
    """

    def lower(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
        arguments = [v for k, v in a.items() if k in ("self", "other")]
        if any(n.meta["val"].dtype != torch.bool for n in node.all_input_nodes):
            raise b.unsupported(f"{b.form.target} has it for conditions alone")
        return apply(b, fn, arguments, b.result(node))

    return lower


def _filled(number: float | None) -> Handler:
    """Returns a handler that lowers a tensor filled with ``number``; None takes the number from the op's arguments."""

    def lower(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
        if b.dtype(node.meta["val"]) != "f32":
            raise b.unsupported(f"{b.form.target} fills floats alone")
        return constant(b, float(a["fill_value"] if number is None else number), b.shape(node))

    return lower


HANDLERS: Mapping[Any, Handler] = of_each(
    {
        "topk": _top_k,
        "max": _max,
        "gather": _gather,
        "scatter": _scatter,
        "softmax": _softmax,
        "masked_fill": _masked_fill,
        **{fn: _compare(fn) for fn in ("lt", "le", "gt", "ge", "eq", "ne")},
        **{fn: _logical(fn) for fn in ("logical_and", "logical_or", "logical_not")},
        "clamp_tensors": _clamp,
        "zeros_like": _filled(0.0),
        "ones_like": _filled(1.0),
        "full_like": _filled(None),
    }
)
"""Ops of routers -> their handlers. None of these ops mixes tokens."""
