"""Lowers elementwise ops and reductions of ATen to the steps ``elementwise`` and ``reduce``."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx.node import Node

from enginewright.passes.framework.aten_ops import activation_kind, dims_of, is_log_of_one_more_exp, of_each
from enginewright.runtime.shared.lowered_program import Affine

from .builder import Builder, Value
from .lower_ew import Handler
from .views import View, elements, permute, reshape

_INTEGER = frozenset({"add", "sub", "mul", "maximum", "minimum"})


def apply(b: Builder, fn: str, arguments: list[Value], out: View) -> View:
    """Adds an elementwise step of the function ``fn`` that writes to ``out``, and returns ``out``.

    It has one or two arguments; at most one of two may be a number.
    """
    attrs: dict[str, int | float | bool | str] = {"fn": fn}
    views = []
    for i, argument in enumerate(arguments):
        if isinstance(argument, (int, float)):
            if len(arguments) != 2 or "scalar" in attrs:
                raise b.unsupported(f"{b.form.target} has no {fn} of numbers alone")
            attrs |= {"scalar": _number(b, argument, out), "scalar_first": i == 0}
        else:
            view = b.view(argument)
            views.append(b.cast(view) if out.dtype == "f32" else view)
    if out.dtype == "i32" and (fn not in _INTEGER or any(v.dtype != "i32" for v in views)):
        raise b.unsupported(f"{b.form.target} has no {fn} of integers")
    b.strided_step("elementwise", views, out, attrs)
    return out


def _number(b: Builder, value: float, out: View) -> int | float:
    if out.dtype == "i32":
        if value != int(value):
            raise b.unsupported(f"{value} isn't an integer")
        return int(value)
    if not math.isfinite(value):
        raise b.unsupported(f"the number {value} is not finite")
    return float(value)


def _plain(fn: str) -> Handler:
    """Returns a handler that lowers an op to the function ``fn`` of the op's tensor and number arguments, in order."""

    def lower(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
        values = list(a.values())[: _ARITY.get(fn, 1)]
        numbers = [v for v in values if isinstance(v, (int, float))]
        if len(values) == len(numbers) == 2 and fn in _FOLD:
            return _FOLD[fn](*numbers)
        return apply(b, fn, values, b.result(node))

    return lower


_ARITY = {"mul": 2, "div": 2, "pow": 2, "maximum": 2, "minimum": 2, "where": 3}
_FOLD: Mapping[str, Callable[[float, float], float]] = {"mul": operator.mul, "div": operator.truediv}


def _scaled(fn: str) -> Handler:
    """Returns a handler that lowers add or sub (``fn``), whose second argument is multiplied by ``alpha``."""

    def lower(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
        first, second, alpha = list(a.values())[:3]
        if alpha != 1:
            if isinstance(second, (int, float)):
                second = second * alpha
            else:
                view = b.view(second)
                second = apply(b, "mul", [view, alpha], b.buffer(view.shape, view.dtype))
        if isinstance(first, (int, float)) and isinstance(second, (int, float)):
            return first + second if fn == "add" else first - second
        return apply(b, fn, [first, second], b.result(node))

    return lower


def _reverse_subtract(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    first, second, alpha = list(a.values())[:3]
    if alpha != 1:
        raise b.unsupported(f"{b.form.target} has no rsub with alpha")
    return apply(b, "sub", [second, first], b.result(node))


def _activation(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    return apply(b, activation_kind(node), [a["self"]], b.result(node))


def _reciprocal(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    return apply(b, "div", [1.0, a["self"]], b.result(node))


def _square(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    return apply(b, "mul", [a["self"], a["self"]], b.result(node))


def _exp_less_one(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    """Lowers expm1 as exp(x) - 1. Results near 0 have fewer correct digits than torch's; the absolute error is like
    that near 1.
    """
    out = b.result(node)
    return apply(b, "sub", [apply(b, "exp", [a["self"]], b.buffer(out.shape, out.dtype)), 1.0], out)


def _log_of_one_more(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    """Lowers log1p as log(1 + x), with the precision of ``_exp_less_one``."""
    out = b.result(node)
    return apply(b, "log", [apply(b, "add", [a["self"], 1.0], b.buffer(out.shape, out.dtype))], out)


def _divide_mode(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    if a["rounding_mode"] is not None:
        raise b.unsupported(f"{b.form.target} has no division that rounds ({a['rounding_mode']})")
    return apply(b, "div", [a["self"], a["other"]], b.result(node))


def _clamp(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    value, out = a["self"], b.result(node)
    if a.get("min") is not None:
        value = apply(b, "maximum", [value, a["min"]], out if a.get("max") is None else b.buffer(out.shape, out.dtype))
    if a.get("max") is not None:
        value = apply(b, "minimum", [value, a["max"]], out)
    result: Value = value
    return result


def _softplus(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    """Lowers softplus as max(x, 0) + log(1 + exp(-|x|)), which doesn't overflow."""
    if not is_log_of_one_more_exp(a):
        raise b.unsupported(f"{b.form.target} has no softplus with beta {a['beta']} and threshold {a['threshold']}")
    x, out = b.view(a["self"]), b.result(node)
    tail = b.buffer(out.shape)
    apply(b, "abs", [x], tail)
    for fn in ("neg", "exp"):
        apply(b, fn, [tail], tail)
    apply(b, "log", [apply(b, "add", [tail, 1.0], tail)], tail)
    return apply(b, "add", [apply(b, "relu", [x], b.buffer(out.shape)), tail], out)


def _scalar_tensor(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    """Lowers a tensor of one constant number to that number."""
    if b.shape(node):
        raise b.unsupported(f"{b.form.target} has no kernel that fills a tensor")
    number: Value = a["s"] if "s" in a else a["fill_value"]
    return number


def _reduce(kind: str) -> Handler:
    def lower(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
        view = b.cast(b.view(a["self"]))
        reduced = dims_of(a, view.rank) or list(range(view.rank))  # an empty list means all, too
        unreduced = [d for d in range(view.rank) if d not in reduced]
        ordered = permute(view, [*unreduced, *reduced])
        width = elements(ordered.shape[len(unreduced) :])
        if not width.is_constant:
            raise b.unsupported(f"{b.form.target} doesn't reduce over tokens")
        # Kept dimensions become one: the kernel takes rank 4, and no more than [rows, C] is needed.
        flat = b.unit(b.reshaped(ordered, (elements(ordered.shape[: len(unreduced)]), width)))
        out = b.result(node)
        target = reshape(out, (flat.shape[0], Affine(1)))
        assert target is not None, "a reduction's output is dense"
        b.step("reduce", [flat], [target], {"kind": kind})
        return out

    return lower


ELEMENTWISE: Mapping[Any, Handler] = of_each(
    {
        **{fn: _scaled(fn) for fn in ("add", "sub")},
        **{fn: _plain(fn) for fn in _ARITY},
        **{
            fn: _plain(fn)
            for fn in ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "erf", "floor", "round")
        },
        **dict.fromkeys(("silu", "gelu", "relu", "sigmoid", "tanh"), _activation),
        "rsub": _reverse_subtract,
        "div_mode": _divide_mode,
        "reciprocal": _reciprocal,
        "square": _square,
        "expm1": _exp_less_one,
        "log1p": _log_of_one_more,
        "softplus": _softplus,
        "clamp": _clamp,
        "full": _scalar_tensor,
    }
)

REDUCTIONS: Mapping[Any, Handler] = of_each({"mean": _reduce("mean"), "sum": _reduce("sum"), "amax": _reduce("max")})
