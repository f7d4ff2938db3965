"""Emits element-wise ATen ops and reductions. Arithmetic has the type of the result, comparisons that of their
operands.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.aten_ops import activation_kind, dims_of, is_log_of_one_more_exp, of_each

from .graph import GraphBuilder, Handler


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _plain(kind: str, arity: int) -> Handler:
    """Returns a handler that emits the operator ``kind``, whose inputs are the first ``arity`` arguments, in order."""

    def emit(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
        arguments = list(a.values())[:arity]
        return b.op(kind, *(b.cast(v, _dtype(node)) for v in arguments))

    return emit


def _scaled(kind: str) -> Handler:
    """Returns a handler that emits add or sub (``kind``), whose second argument is multiplied by ``alpha``."""

    def emit(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
        first, second, alpha = list(a.values())[:3]
        x, y = b.cast(first, _dtype(node)), b.cast(second, _dtype(node))
        return b.op(kind, x, y if alpha == 1 else b.op("Mul", y, b.number(alpha, _dtype(node))))

    return emit


def _reverse_subtract(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    first, second, alpha = list(a.values())[:3]
    x, y = b.cast(first, _dtype(node)), b.cast(second, _dtype(node))
    return b.op("Sub", y, x if alpha == 1 else b.op("Mul", x, b.number(alpha, _dtype(node))))


def activation(b: GraphBuilder, kind: str, x: str) -> str:
    """Emits the activation ``kind``, one of ``LINEAR_ACTIVATIONS``, of the floats ``x``, and returns the result."""
    match kind:
        case "silu":
            return b.op("Mul", x, b.op("Sigmoid", x))
        case "gelu":
            return b.op("Gelu", x)
        case "gelu_tanh":
            return b.op("Gelu", x, approximate="tanh")
        case "relu2":
            positive = b.op("Relu", x)
            return b.op("Mul", positive, positive)
        case "relu" | "sigmoid" | "tanh":
            return b.op(kind.capitalize(), x)
        case _:
            raise b.unsupported(f"the onnx target has no activation {kind}")


def _activation(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    return activation(b, activation_kind(node), b.cast(a["self"], _dtype(node)))


def _chain(*kinds: str) -> Handler:
    """Returns a handler that emits several operators with one input each, one after the other."""

    def emit(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
        return functools.reduce(lambda x, kind: b.op(kind, x), kinds, b.cast(a["self"], _dtype(node)))

    return emit


def _square(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    x = b.value(a["self"])
    return b.op("Mul", x, x)


def _exp_less_one(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    """Emits expm1 as exp(x) - 1. Results near 0 have fewer correct digits than torch's; the absolute error is like that
    near 1.
    """
    return b.op("Sub", b.op("Exp", b.cast(a["self"], _dtype(node))), b.number(1.0, _dtype(node)))


def _log_of_one_more(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    """Emits log1p as log(1 + x). Results near 0 have fewer correct digits than torch's."""
    return b.op("Log", b.op("Add", b.cast(a["self"], _dtype(node)), b.number(1.0, _dtype(node))))


def _softplus(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    """Emits softplus as max(x, 0) + log(1 + exp(-|x|)), which doesn't overflow."""
    if not is_log_of_one_more_exp(a):
        raise b.unsupported(f"the onnx target has no softplus with beta {a['beta']} and threshold {a['threshold']}")
    x, one = b.cast(a["self"], _dtype(node)), b.number(1.0, _dtype(node))
    tail = b.op("Log", b.op("Add", b.op("Exp", b.op("Neg", b.op("Abs", x))), one))
    return b.op("Add", b.op("Relu", x), tail)


def _divide_mode(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    if a["rounding_mode"] is not None:
        raise b.unsupported(f"the onnx target has no division that rounds ({a['rounding_mode']})")
    return b.op("Div", b.cast(a["self"], _dtype(node)), b.cast(a["other"], _dtype(node)))


def _clamp(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    """Emits a clamp, whose bounds are numbers or tensors."""
    x = b.cast(a["self"], _dtype(node))
    for kind, bound in (("Max", a.get("min")), ("Min", a.get("max"))):
        if bound is not None:
            x = b.op(kind, x, b.cast(bound, _dtype(node)))
    return x


def _where(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    return b.op("Where", b.value(a["condition"]), b.cast(a["self"], _dtype(node)), b.cast(a["other"], _dtype(node)))


def _masked_fill(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    return b.op("Where", b.value(a["mask"]), b.cast(a["value"], _dtype(node)), b.cast(a["self"], _dtype(node)))


def _compare(kind: str, inverted: bool = False) -> Handler:
    def emit(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
        first, second = a["self"], a["other"]
        dtype = functools.reduce(torch.promote_types, [n.meta["val"].dtype for n in node.all_input_nodes])
        if isinstance(second, float) and not dtype.is_floating_point:
            dtype = torch.float32
        if dtype == torch.bool and (kind != "Equal" or not isinstance(second, (bool, Node))):
            dtype = torch.int64
        result = b.op(kind, b.cast(first, dtype), b.cast(second, dtype))
        return b.op("Not", result) if inverted else result

    return emit


def _logical(kind: str) -> Handler:
    """Returns a handler that emits an op on booleans as ``kind``. It rejects integers, for which such an op is
    bitwise.
    """

    def emit(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
        if any(_dtype(n) != torch.bool for n in node.all_input_nodes):
            raise b.unsupported("the onnx target has it for conditions alone")
        return b.op(kind, *(b.value(v) for k, v in a.items() if k in ("self", "other")))

    return emit


def _reduce(kind: str) -> Handler:
    def emit(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
        source = a["self"]
        rank = source.meta["val"].dim()
        dims = dims_of(a, rank) or list(range(rank))  # an empty list means all, too
        if any(not s.is_Integer for s in (b.expressions(source)[d] for d in dims)):
            raise b.unsupported("the onnx target doesn't reduce over tokens")
        axes = b.integers(*(d - rank for d in dims))
        return b.op(kind, b.cast(source, _dtype(node)), axes, keepdims=int(bool(a.get("keepdim", False))))

    return emit


_OF_LIKE_NAME = ("neg", "abs", "exp", "log", "sqrt", "sin", "cos", "erf", "floor", "round", "reciprocal")
_COMPARISONS = {
    "lt": ("Less", False),
    "le": ("LessOrEqual", False),
    "gt": ("Greater", False),
    "ge": ("GreaterOrEqual", False),
    "eq": ("Equal", False),
    "ne": ("Equal", True),
}

ELEMENTWISE: Mapping[Any, Handler] = of_each(
    {
        **{name: _scaled(name.capitalize()) for name in ("add", "sub")},
        **{name: _plain(name.capitalize(), 2) for name in ("mul", "div", "pow")},
        **{name: _plain(name.capitalize(), 1) for name in _OF_LIKE_NAME},
        **{name: _compare(*kind) for name, kind in _COMPARISONS.items()},
        **dict.fromkeys(("silu", "gelu", "relu", "sigmoid", "tanh"), _activation),
        **dict.fromkeys(("clamp", "clamp_tensors"), _clamp),
        "rsub": _reverse_subtract,
        "div_mode": _divide_mode,
        "maximum": _plain("Max", 2),
        "minimum": _plain("Min", 2),
        "where": _where,
        "masked_fill": _masked_fill,
        "rsqrt": _chain("Sqrt", "Reciprocal"),
        "square": _square,
        "expm1": _exp_less_one,
        "log1p": _log_of_one_more,
        "softplus": _softplus,
        "logical_not": _logical("Not"),
        "logical_and": _logical("And"),
        "logical_or": _logical("Or"),
    }
)

REDUCTIONS: Mapping[Any, Handler] = of_each(
    {"mean": _reduce("ReduceMean"), "sum": _reduce("ReduceSum"), "amax": _reduce("ReduceMax")}
)
