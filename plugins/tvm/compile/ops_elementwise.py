"""Writes elementwise functions, copies and reductions of operands with any strides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tvm.tirx.script.builder import ir as T

from .kernel import Expr, Handler, Kernel, Local, Memory, f32, int64, vector
from .ops_rows import sum_along
from .vector_math import ACTIVATIONS, absolute, erf, exp

Function = Callable[..., Expr]
"""A function of one to three operands, with the number of lanes as its last argument."""


def _truth(condition: Expr, n: int) -> Expr:
    return T.Select(condition, vector(f32(1.0), n), vector(f32(0.0), n))


def _no(x: Expr, n: int) -> Expr:
    return x == vector(f32(0.0), n)


def _larger(x: Expr, y: Expr, n: int) -> Expr:
    """Returns the larger of x and y; NaN if either is NaN."""
    return T.Select(T.Or(x > y, x != x), x, y)


def _smaller(x: Expr, y: Expr, n: int) -> Expr:
    return T.Select(T.Or(x < y, x != x), x, y)


def _each_lane(name: str, x: Expr, n: int) -> Expr:
    return T.call_llvm_pure_intrin("float32" if n == 1 else f"float32x{n}", f"llvm.{name}", x)


_FUNCTIONS: Mapping[str, Function] = {
    "add": lambda x, y, n: x + y,
    "sub": lambda x, y, n: x - y,
    "mul": lambda x, y, n: x * y,
    "div": lambda x, y, n: x / y,
    "maximum": _larger,
    "minimum": _smaller,
    "lt": lambda x, y, n: _truth(x < y, n),
    "le": lambda x, y, n: _truth(x <= y, n),
    "gt": lambda x, y, n: _truth(x > y, n),
    "ge": lambda x, y, n: _truth(x >= y, n),
    "eq": lambda x, y, n: _truth(x == y, n),
    "ne": lambda x, y, n: _truth(x != y, n),
    "logical_and": lambda x, y, n: T.Select(_no(x, n), vector(f32(0.0), n), _truth(y != vector(f32(0.0), n), n)),
    "logical_or": lambda x, y, n: T.Select(_no(x, n), _truth(y != vector(f32(0.0), n), n), vector(f32(1.0), n)),
    "logical_not": lambda x, n: _truth(_no(x, n), n),
    "where": lambda condition, x, y, n: T.Select(_no(condition, n), y, x),
    "neg": lambda x, n: vector(f32(0.0), n) - x,
    "abs": absolute,
    "exp": exp,
    "sqrt": lambda x, n: T.sqrt(x),
    "rsqrt": lambda x, n: vector(f32(1.0), n) / T.sqrt(x),
    "erf": erf,
    **{name: ACTIVATIONS[name] for name in ("tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "relu")},
    "floor": partial(_each_lane, "floor"),
    "round": partial(_each_lane, "nearbyint"),
    "cast": lambda x, n: T.cast(x, "float32" if n == 1 else f"float32x{n}"),
}
_ONE_AT_A_TIME: Mapping[str, Function] = {
    "pow": lambda x, y, n: T.pow(x, y),
    "log": lambda x, n: T.log(x),
    "sin": lambda x, n: T.sin(x),
    "cos": lambda x, n: T.cos(x),
}
"""Functions of the C library, which compute one element at a time."""


def _over(k: Kernel, out: Memory, size: int | None, body: Callable[..., None], work: int) -> None:
    """Writes loops that call body(index..., column) for every index of the leading dimensions.

    The body handles ``size`` elements along the last dimension; None leaves it out. ``work`` is the number of
    operations of one element.
    """
    extents = [out.extent(axis) for axis in range(len(out.shape) - 1)]
    if not extents:
        body()
        return
    inner = 1
    for axis in range(1, len(extents)):
        if out.shape[axis].is_constant:
            inner *= out.shape[axis].constant

    def nested(axis: int, index: tuple[Expr, ...]) -> None:
        if axis == len(extents):
            body(*index)
            return
        with T.serial(int64(0), extents[axis]) as i:
            nested(axis + 1, (*index, i))

    k.each(extents[0], work * inner * (size or 64), lambda i: nested(1, (i,)))


def _elementwise(k: Kernel) -> None:
    inputs, out, attrs = k.inputs, k.outputs[0], k.step.attrs
    name = str(attrs["fn"])
    function = _FUNCTIONS.get(name) or _ONE_AT_A_TIME[name]
    integer = all(x.dtype == "i32" for x in inputs) and name != "cast"
    number = attrs.get("scalar")
    last = out.shape[-1]
    dense = all(x.strides[-1] in (0, 1) for x in inputs) and out.strides[-1] == 1
    vectors = name in _FUNCTIONS and dense and last.is_constant

    def piece(index: tuple[Expr, ...], lanes: int) -> None:
        values = [x.load(*index, lanes=lanes) for x in inputs]
        if number is not None:
            constant = T.int32(int(number)) if integer else f32(float(number))
            other = vector(constant, lanes)
            values = [other, values[0]] if attrs.get("scalar_first") else [values[0], other]
        values = [T.Bind(value) for value in values]
        out.store(function(*values, lanes), *index, lanes=lanes)

    def row(*index: Expr) -> None:
        if vectors:
            k.along(last.constant, lambda c, lanes: piece((*index, c), lanes))
        else:
            with T.serial(int64(0), k.value(last)) as c:
                piece((*index, c), 1)

    _over(k, out, last.constant if last.is_constant else None, row, 4)


def _copy(k: Kernel) -> None:
    x, out = k.inputs[0], k.outputs[0]
    last = out.shape[-1] if out.shape else None

    def row(*index: Expr) -> None:
        assert last is not None
        if last.is_constant and x.strides[-1] in (0, 1) and out.strides[-1] == 1:
            k.along(last.constant, lambda c, lanes: out.store(x.load(*index, c, lanes=lanes), *index, c, lanes=lanes))
        else:
            with T.serial(int64(0), k.value(last)) as c:
                out.store(x.load(*index, c), *index, c)

    _over(k, out, last.constant if last is not None and last.is_constant else None, row, 1)


def _reduce(k: Kernel) -> None:
    x, out, kind = k.inputs[0], k.outputs[0], str(k.step.attrs["kind"])
    size = x.shape[-1].constant

    def row(*index: Expr) -> None:
        if kind == "max":
            best = Local(x.load(*index, int64(0)))
            with T.serial(int64(1), int64(size)) as c:
                best.set(_larger(x.load(*index, c), best.get(), 1))
            out.store(best.get(), *index, int64(0))
            return
        whole = sum_along(k, size, lambda c, lanes, before: before + x.load(*index, c, lanes=lanes))
        out.store(whole if kind == "sum" else whole / f32(size), *index, int64(0))

    _over(k, out, size, row, 2)


HANDLERS: Mapping[str, Handler] = {"elementwise": _elementwise, "copy": _copy, "reduce": _reduce}
