"""Kernels for a GPU, with a thread for each row or each result.

Most are the CPU kernels' loops with one lane. Kernels whose CPU loops are blocked for registers and caches are written
here separately. They haven't run on a GPU yet: tests run the same loops on a CPU, and compile them for GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm.tirx.script.builder import ir as T

from enginewright.runtime.shared.panel_layouts import PANEL

from . import ops_elementwise, ops_rows
from .kernel import Expr, Handler, Kernel, Local, f32, int64, load, on_stack
from .ops_attention import NONE, Attention
from .ops_linear import Product


def _linear(k: Kernel) -> None:
    """Writes a product with a thread for each result. Neighbouring threads compute neighbouring columns of a panel, so
    that a warp reads whole cache lines.
    """
    x, weight, *rest = k.inputs
    k.check_layout(k.use(1), "panel32")
    product, (columns, depth) = Product.of(k, rest), (size.constant for size in weight.shape)

    def result(i: Expr) -> None:
        row, column = T.Bind(T.floordiv(i, int64(columns))), T.Bind(T.floormod(i, int64(columns)))
        panel, lane = T.floordiv(column, int64(PANEL)), T.floormod(column, int64(PANEL))
        start = T.Bind(weight.base + panel * int64(PANEL * depth) + lane)
        total = Local(f32(0.0))
        with T.serial(int64(0), int64(depth)) as j:
            total.set(T.fma(x.load(row, j), load(weight.buffer, start + j * int64(PANEL)), total.get()))
        product.store(total.get(), row, column, 1)

    k.each(x.extent(0) * int64(columns), 2 * depth, result)


def _paged_attention(k: Kernel) -> None:
    """Writes attention with a thread for each head of a token. It processes one key after the other, with a running
    maximum and sum.
    """
    a, (keys, values, group), attrs = Attention.from_kernel(k), k.cache(), k.step.attrs
    heads, size = a.q.shape[1].constant, group.block_size
    cached, depth, channels, _ = group.sizes
    shared, window, softcap = heads // cached, int(attrs["window"]), float(attrs["softcap"])

    def one(i: Expr) -> None:
        token, head = T.Bind(T.floordiv(i, int64(heads))), T.Bind(T.floormod(i, int64(heads)))
        request = Local(int64(0), dtype="int64")
        with T.While(a.end(request.get()) <= token):
            request.set(request.get() + int64(1))
        b = T.Bind(request.get())
        position = T.Bind(T.cast(a.kv_len.load(b), "int64") - (a.end(b) - token))
        first = T.Bind(T.max(position - int64(window - 1), int64(0))) if window else int64(0)
        greatest, total, sums = Local(f32(NONE)), Local(f32(0.0)), on_stack(channels)
        with T.serial(int64(0), int64(channels)) as c:
            T.buffer_store(sums, f32(0.0), [c])
        with T.serial(first, position + int64(1)) as at:
            block = T.cast(a.table.buffer[b, T.floordiv(at, int64(size))], "int64")
            piece = T.Bind((block * int64(cached) + T.floordiv(head, int64(shared))) * int64(size))
            place = T.Bind(T.floormod(at, int64(size)))
            score = Local(f32(0.0))
            with T.serial(int64(0), int64(depth)) as d:
                key = load(keys, piece * int64(depth) + d * int64(size) + place)
                score.set(T.fma(a.q.load(token, head, d), key, score.get()))
            score.set(score.get() * f32(float(attrs["scale"])))
            if softcap:
                score.set(T.tanh(score.get() / f32(softcap)) * f32(softcap))
            if a.slopes is not None:
                score.set(score.get() + a.slopes.load(head) * T.cast(at - position, "float32"))
            highest = T.Bind(T.max(greatest.get(), score.get()))
            factor = T.Bind(T.exp(greatest.get() - highest))
            power = T.Bind(T.exp(score.get() - highest))
            greatest.set(highest)
            total.set(total.get() * factor + power)
            with T.serial(int64(0), int64(channels)) as c:
                value = load(values, piece * int64(channels) + place * int64(channels) + c)
                T.buffer_store(sums, sums[c] * factor + power * value, [c])
        if a.sinks is not None:
            total.set(total.get() + T.exp(a.sinks.load(head) - greatest.get()))
        with T.serial(int64(0), int64(channels)) as c:
            a.out.store(sums[c] / total.get(), token, head, c)

    k.each(a.q.extent(0) * int64(heads), 4 * depth, one)


HANDLERS: Mapping[str, Handler] = {
    **ops_rows.HANDLERS,
    **ops_elementwise.HANDLERS,
    "embedding": ops_rows.float_embedding,
    "linear": _linear,
    "paged_attention": _paged_attention,
}
"""Ops of lowered programs -> the functions that write their GPU kernels."""
