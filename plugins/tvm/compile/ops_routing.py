"""Writes the steps of routers and experts: top-k, gather, scatter, and products with chosen experts' weights."""

from __future__ import annotations

from collections.abc import Mapping

from tvm.tirx.script.builder import ir as T

from .kernel import Expr, Handler, Kernel, Local, f32, int64, lanes_of, row_index, rows_of, vector

_LOWEST, _HIGHEST = -(2**31), 2**31 - 1
_COLUMNS = 64
"""The number of columns of a token's result that one thread adds up."""


def _order(x: Expr) -> Expr:
    """Returns an integer that has the order of the floats x: equal for -0 and 0, and largest for NaN."""
    bits = T.Bind(T.reinterpret("int32", x + f32(0.0)))
    magnitude = T.bitwise_and(bits >> T.int32(31), T.int32(_HIGHEST))
    return T.Select(x != x, T.int32(_HIGHEST), T.bitwise_xor(bits, magnitude))


def _top_k(k: Kernel) -> None:
    x, (values, places) = k.inputs[0], k.outputs
    size, top = x.shape[-1].constant, int(k.step.attrs["k"])
    count, inner = rows_of(x)

    def row(i: Expr) -> None:
        at = row_index(x, i, inner)
        last, where = Local(T.int32(_HIGHEST), dtype="int32"), Local(T.int32(-1), dtype="int32")
        with T.serial(int64(0), int64(top)) as j:
            best, place = Local(T.int32(_LOWEST), dtype="int32"), Local(T.int32(-1), dtype="int32")
            with T.serial(int64(0), int64(size)) as c:
                key, column = T.Bind(_order(x.load(*at, c))), T.Bind(T.cast(c, "int32"))
                later = T.Or(key < last.get(), T.And(key == last.get(), column > where.get()))
                better = T.Or(key > best.get(), place.get() < T.int32(0))
                with T.If(T.And(later, better)), T.Then():
                    best.set(key)
                    place.set(column)
            last.set(best.get())
            where.set(place.get())
            values.store(x.load(*at, T.cast(place.get(), "int64")), *at, j)
            places.store(place.get(), *at, j)

    k.each(count, 4 * size * top, row)


def _gather(k: Kernel) -> None:
    x, index = k.inputs
    out = k.outputs[0]
    count, inner = rows_of(index)

    def row(i: Expr) -> None:
        at = row_index(index, i, inner)
        with T.serial(int64(0), k.value(index.shape[-1])) as j:
            out.store(x.load(*at, T.cast(index.load(*at, j), "int64")), *at, j)

    k.each(count, 4 * index.shape[-1].constant, row)


def _scatter(k: Kernel) -> None:
    x, index = k.inputs
    out, size = k.outputs[0], x.shape[-1].constant
    count, inner = rows_of(x)

    def row(i: Expr) -> None:
        at = row_index(x, i, inner)
        with T.serial(int64(0), int64(size)) as c:
            out.store(x.load(*at, c), *at, c)
        with T.serial(int64(0), k.value(index.shape[-1])) as j:
            out.store(f32(float(k.step.attrs["value"])), *at, T.cast(index.load(*at, j), "int64"))

    k.each(count, 2 * size, row)


def _route_experts(k: Kernel) -> None:
    (ids,), (order, rows, starts) = k.inputs, k.outputs
    choices = ids.shape[1].constant
    places = T.Bind(ids.extent(0) * int64(choices))
    cursor = Local(int64(0), dtype="int64")
    starts.store(T.int32(0), int64(0))
    with T.serial(int64(0), int64(int(k.step.attrs["experts"]))) as e:
        with T.serial(int64(0), places) as p:
            token = T.Bind(T.floordiv(p, int64(choices)))
            chosen = ids.load(token, p - token * int64(choices))
            with T.If(T.cast(chosen, "int64") == e), T.Then():
                order.store(T.cast(p, "int32"), cursor.get())
                rows.store(T.cast(token, "int32"), cursor.get())
                cursor.set(cursor.get() + int64(1))
        starts.store(T.cast(cursor.get(), "int32"), e + int64(1))


def _combine_experts(k: Kernel) -> None:
    """Writes the sums of each token's experts' results, in ascending order of the experts, which is the order of the
    rows.
    """
    y, order, weights = k.inputs
    out = k.outputs[0]
    size, choices = out.shape[1].constant, weights.shape[1].constant

    def columns(start: int, width: int) -> None:
        with T.serial(int64(0), out.extent(0)) as t:
            for c, lanes in lanes_of(width):
                out.store(vector(f32(0.0), lanes), t, int64(start + c), lanes=lanes)
        with T.serial(int64(0), order.extent(0)) as m:
            place = T.Bind(T.cast(order.load(m), "int64"))
            token = T.Bind(T.floordiv(place, int64(choices)))
            weight = T.Bind(weights.load(token, place - token * int64(choices)))
            for c, lanes in lanes_of(width):
                at = int64(start + c)
                before = out.load(token, at, lanes=lanes)
                now = T.fma(vector(weight, lanes), y.load(m, at, lanes=lanes), before)
                out.store(now, token, at, lanes=lanes)

    for start in range(0, size, _COLUMNS):
        columns(start, min(_COLUMNS, size - start))


HANDLERS: Mapping[str, Handler] = {
    "top_k": _top_k,
    "gather": _gather,
    "scatter": _scatter,
    "route_experts": _route_experts,
    "combine_experts": _combine_experts,
}
