"""Writes steps over rows: embeddings, norms, rotations, gated activations, cache writes, and selections of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm.tirx.script.builder import ir as T

from enginewright.runtime.shared.panel_layouts import PANEL

from .kernel import LANES, Expr, Handler, Kernel, Local, Memory, f32, int64, lanes_of, load, row_index, rows_of, vector
from .vector_math import ACTIVATIONS


def float_embedding(k: Kernel) -> None:
    ids, table, *_ = k.inputs
    out = k.outputs[0]
    size, use = out.shape[-1].constant, k.use(1)
    k.check_layout(use, "panel32", "rows")

    def row(t: Expr) -> None:
        number = T.Bind(T.cast(ids.load(t), "int64"))
        if use.layout == "rows":
            k.along(size, lambda c, lanes: out.store(table.load(number, c, lanes=lanes), t, c, lanes=lanes))
            return
        start = T.Bind(T.floordiv(number, int64(PANEL)) * int64(PANEL * size) + T.floormod(number, int64(PANEL)))
        with T.serial(int64(0), int64(size)) as c:
            out.store(load(table.buffer, start + c * PANEL), t, c)

    k.each(ids.extent(0), 4 * size, row)


def _take_rows(k: Kernel) -> None:
    x, rows = k.inputs
    out = k.outputs[0]
    size = out.shape[-1].constant

    def row(r: Expr) -> None:
        number = T.Bind(T.cast(rows.load(r), "int64"))
        k.along(size, lambda c, lanes: out.store(x.load(number, c, lanes=lanes), r, c, lanes=lanes))

    k.each(rows.extent(0), size, row)


# ---- norms


def total(lanes: Any) -> Expr:
    """Returns the sum of the 16 numbers in ``lanes``, added in halves: 8, 4, 2, 1."""
    values = [lanes[int64(i)] for i in range(LANES)]
    while len(values) > 1:
        half = len(values) // 2
        values = [a + b for a, b in zip(values[:half], values[half:], strict=True)]
    return T.Bind(values[0])


def sum_along(k: Kernel, size: int, term: Callable[[Expr, int, Expr], Expr]) -> Expr:
    """Writes a sum over a row of ``size`` elements, and returns it. Lane j adds the elements j, j + 16, j + 32, ...

    ``term(start, lanes, sum)`` returns the sum with the terms of ``lanes`` elements from ``start`` on.
    """
    if k.level.lanes == 1:
        whole_sum = Local(f32(0.0))
        k.along(size, lambda c, n: whole_sum.set(term(c, n, whole_sum.get())))
        return T.Bind(whole_sum.get())
    parts = Local(vector(f32(0.0), LANES), LANES)
    whole = size // LANES
    if whole:
        with T.serial(int64(0), int64(whole)) as v:
            parts.set(term(v * LANES, LANES, parts.get()))
    lanes = parts.lanes()
    for j in range(size - whole * LANES):
        T.buffer_store(lanes, term(int64(whole * LANES + j), 1, lanes[int64(j)]), [int64(j)])
    return total(lanes)


def _norm(k: Kernel) -> None:
    step, inputs = k.step, k.inputs
    x, rest = inputs[0], inputs[1:]
    residual = rest.pop(0) if step.op.startswith("add_") else None
    weight = rest.pop(0) if step.attrs.get("has_weight") else None
    bias = rest.pop(0) if step.attrs.get("has_bias") else None
    out = k.outputs[0]
    size, layer = x.shape[-1].constant, "layer" in step.op
    count, inner = rows_of(x)

    def row(i: Expr) -> None:
        at = row_index(x, i, inner)
        source = x
        if residual is not None:
            source = k.outputs[1]
            k.along(
                size,
                lambda c, n: source.store(x.load(*at, c, lanes=n) + residual.load(*at, c, lanes=n), *at, c, lanes=n),
            )
        mean = None
        if layer:
            mean = T.Bind(sum_along(k, size, lambda c, n, s: s + source.load(*at, c, lanes=n)) / f32(size))

        def value(c: Expr, lanes: int) -> Expr:
            loaded = source.load(*at, c, lanes=lanes)
            return loaded if mean is None else loaded - vector(mean, lanes)

        def square(c: Expr, lanes: int, before: Expr) -> Expr:
            v = T.Bind(value(c, lanes))
            return T.fma(v, v, before)

        variance = sum_along(k, size, square) / f32(size)
        factor = T.Bind(f32(1.0) / T.sqrt(variance + f32(float(step.attrs["eps"]))))

        def write(c: Expr, lanes: int) -> None:
            v = value(c, lanes) * vector(factor, lanes)
            if weight is not None:
                v = v * weight.load(c, lanes=lanes)
            if bias is not None:
                v = v + bias.load(c, lanes=lanes)
            out.store(v, *at, c, lanes=lanes)

        k.along(size, write)

    k.each(count, 4 * size, row)


# ---- rotations


def _rope_table(k: Kernel) -> None:
    positions, frequencies = k.inputs
    out, half = k.outputs[0], frequencies.shape[0].constant
    scale = f32(float(k.step.attrs["scale"]))

    def row(t: Expr) -> None:
        position = T.Bind(T.cast(positions.load(t), "float32"))
        with T.serial(int64(0), int64(half)) as f:
            angle = T.Bind(position * frequencies.load(f))
            out.store(T.cos(angle) * scale, t, f)
            out.store(T.sin(angle) * scale, t, f + int64(half))

    k.each(positions.extent(0), 64 * half, row)


def _rotate(
    x: Memory, table: Memory, t: Expr, head: Expr, interleaved: bool, put: Callable[[Expr, Expr, int], None]
) -> None:
    """Writes the rotation of a head of token ``t`` by the table. Calls put(column, value, lanes) for each vector of
    columns.
    """
    size, half = x.shape[-1].constant, table.shape[-1].constant // 2
    if interleaved:
        with T.serial(int64(0), int64(half)) as i:
            c, s = T.Bind(table.load(t, i)), T.Bind(table.load(t, i + int64(half)))
            first, second = T.Bind(x.load(t, head, i * 2)), T.Bind(x.load(t, head, i * 2 + int64(1)))
            put(i * 2, first * c - second * s, 1)
            put(i * 2 + int64(1), second * c + first * s, 1)
    else:
        for start, lanes in lanes_of(half, x.kernel.level.lanes):
            i = int64(start)
            c = T.Bind(table.load(t, i, lanes=lanes))
            s = T.Bind(table.load(t, i + int64(half), lanes=lanes))
            first = T.Bind(x.load(t, head, i, lanes=lanes))
            second = T.Bind(x.load(t, head, i + int64(half), lanes=lanes))
            put(i, first * c - second * s, lanes)
            put(i + int64(half), T.fma(first, s, second * c), lanes)
    for start, lanes in lanes_of(size - 2 * half, x.kernel.level.lanes):
        i = int64(2 * half + start)
        put(i, x.load(t, head, i, lanes=lanes), lanes)


def _rope(k: Kernel) -> None:
    x, table = k.inputs
    out, turned = k.outputs[0], bool(k.step.attrs["interleaved"])
    heads, size = x.shape[1].constant, x.shape[2].constant

    def row(t: Expr) -> None:
        with T.serial(int64(0), int64(heads)) as h:
            _rotate(x, table, t, h, turned, lambda c, value, n: out.store(value, t, h, c, lanes=n))

    k.each(x.extent(0), 4 * heads * size, row)


def _gated_activation(k: Kernel) -> None:
    x, out = k.inputs[0], k.outputs[0]
    size, kind = out.shape[-1].constant, ACTIVATIONS[str(k.step.attrs["kind"])]
    count, inner = rows_of(x)

    def row(i: Expr) -> None:
        at = row_index(x, i, inner)

        def piece(c: Expr, lanes: int) -> None:
            gate = kind(x.load(*at, c, lanes=lanes), lanes)
            out.store(gate * x.load(*at, c + int64(size), lanes=lanes), *at, c, lanes=lanes)

        k.along(size, piece)

    k.each(count, 16 * size, row)


# ---- the cache


class _Slots:
    """A layer's cache in memory, addressed by slots."""

    def __init__(self, k: Kernel) -> None:
        self.keys, self.values, group = k.cache()
        self.heads, self.key_size, self.value_size, self.block_size = group.sizes

    def at(self, slot: Expr, head: Expr) -> tuple[Expr, Expr, Expr]:
        """Returns the offset of the keys of a slot's block and head, the offset of their values, and the slot's index
        in the block.
        """
        block = T.floordiv(slot, int64(self.block_size))
        piece = T.Bind(block * int64(self.heads) + head)
        place = T.Bind(T.floormod(slot, int64(self.block_size)))
        keys, values = int64(self.block_size * self.key_size), int64(self.block_size * self.value_size)
        return piece * keys, piece * values, place

    def write_key(self, start: Expr, place: Expr, column: Expr, value: Expr, lanes: int) -> None:
        if lanes == 1:
            T.buffer_store(self.keys, value, [start + column * int64(self.block_size) + place])
            return
        at = T.ramp(start + column * int64(self.block_size) + place, int64(self.block_size), lanes)
        T.buffer_store(self.keys, value, [at])

    def write_value(self, start: Expr, place: Expr, token: Expr, head: Expr, v: Memory) -> None:
        size = self.value_size
        for c, lanes in lanes_of(size, v.kernel.level.lanes):
            at = start + place * int64(size) + int64(c)
            index = at if lanes == 1 else T.ramp(at, int64(1), lanes)
            T.buffer_store(self.values, v.load(token, head, int64(c), lanes=lanes), [index])


def _kv_write(k: Kernel) -> None:
    key, v, slots = k.inputs
    cache = _Slots(k)

    def row(t: Expr) -> None:
        slot = T.Bind(T.cast(slots.load(t), "int64"))
        with T.serial(int64(0), int64(cache.heads)) as h:
            keys, values, place = cache.at(slot, h)
            for c, lanes in lanes_of(cache.key_size, k.level.lanes):
                cache.write_key(keys, place, int64(c), key.load(t, h, int64(c), lanes=lanes), lanes)
            cache.write_value(values, place, t, h, v)

    k.each(slots.extent(0), 4 * cache.heads * cache.key_size, row)


def _rope_kv_write(k: Kernel) -> None:
    q, key, v, table, slots = k.inputs
    out, turned, cache = k.outputs[0], bool(k.step.attrs["interleaved"]), _Slots(k)
    heads = q.shape[1].constant

    def row(t: Expr) -> None:
        with T.serial(int64(0), int64(heads)) as h:
            _rotate(q, table, t, h, turned, lambda c, value, n: out.store(value, t, h, c, lanes=n))
        slot = T.Bind(T.cast(slots.load(t), "int64"))
        with T.serial(int64(0), int64(cache.heads)) as h:
            keys, values, place = cache.at(slot, h)
            _rotate(key, table, t, h, turned, lambda c, x, n: cache.write_key(keys, place, c, x, n))
            cache.write_value(values, place, t, h, v)

    k.each(slots.extent(0), 8 * (heads + cache.heads) * cache.key_size, row)


HANDLERS: Mapping[str, Handler] = {
    "take_rows": _take_rows,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "add_rms_norm": _norm,
    "add_layer_norm": _norm,
    "rope_table": _rope_table,
    "rope": _rope,
    "gated_activation": _gated_activation,
    "kv_write": _kv_write,
    "rope_kv_write": _rope_kv_write,
}
