"""Products with weights of bf16 and of integers, what rounds activations for them, and tables of them.

    bf16   panel32x2   a word has 2 neighbours along K of a column    sums are chains of floats, as for weights of f32
    i8     panel32x4   4 bytes of value + 128                         sums are exact integers in each group, then floats
    i4 u4  panel32x8   8 values, the low halves of 4 bytes first      as i8; i4 is stored as value + 8

docs/inside/numerics.md has the order of every sum; it is the same here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tvm.tirx.script.builder import ir as T

from enginewright.runtime.shared.lowered_program import WeightUse
from enginewright.runtime.shared.panel_layouts import BIAS, DEPTHS, PANEL

from .integer_dots import Dots
from .kernel import LANES, Expr, Handler, Kernel, Local, Memory, f32, int64, load, vector
from .ops_linear import Product, along_depth, expert_rows, over_panels
from .ops_rows import float_embedding, total
from .vector_math import floats, fp8_to_float, half_to_float

# ---- bf16


def _cast_bf16(k: Kernel) -> None:
    """Casts to the nearest bf16, ties to even; a NaN stays one."""
    x, out = k.inputs[0], k.outputs[0]
    size = x.shape[-1].constant

    def row(m: Expr) -> None:
        def piece(c: Expr, lanes: int) -> None:
            words = "uint32" if lanes == 1 else f"uint32x{lanes}"
            bits = T.Bind(T.reinterpret(words, x.load(m, c, lanes=lanes)))

            def of(value: int) -> Expr:
                return vector(T.uint32(value), lanes)

            top = T.Bind(bits >> of(16))
            nearest = (bits + of(0x7FFF) + T.bitwise_and(top, of(1))) >> of(16)
            nan = T.bitwise_and(bits, of(0x7FFFFFFF)) > of(0x7F800000)
            chosen = T.Select(nan, T.bitwise_or(top, of(0x40)), nearest)
            out.store(T.cast(chosen, "uint16" if lanes == 1 else f"uint16x{lanes}"), m, c, lanes=lanes)

        k.along(size, piece)
        if size % 2:
            out.store(T.uint16(0), m, int64(size))

    k.each(x.extent(0), 4 * size, row)


# ---- integers


def _quantize_activation(k: Kernel) -> None:
    x, (values, scales, sums) = k.inputs[0], k.outputs
    size = x.shape[-1].constant
    group = int(k.step.attrs["group_size"]) or size
    whole = size // group

    def quantize(m: Expr, g: Expr, width: int) -> None:
        start = T.Bind(g * int64(group))
        largest, special = Local(vector(f32(0.0), LANES), LANES), Local(vector(f32(0.0), LANES), LANES)
        with T.serial(int64(0), int64(width // LANES)) as i:
            v = T.Bind(x.load(m, start + i * LANES, lanes=LANES))
            magnitude = T.Select(v < vector(f32(0.0), LANES), vector(f32(0.0), LANES) - v, v)
            largest.set(T.max(largest.get(), magnitude))
            special.set(T.fma(v, vector(f32(0.0), LANES), special.get()))
        most = Local(T.call_llvm_pure_intrin("float32", "llvm.vector.reduce.fmax", largest.get()))
        nan = Local(total(special.lanes()))
        for c in range(width // LANES * LANES, width):
            v = T.Bind(x.load(m, start + int64(c)))
            most.set(T.max(most.get(), T.Select(v < f32(0.0), f32(0.0) - v, v)))
            nan.set(T.fma(v, f32(0.0), nan.get()))
        factor = T.Bind(f32(127.0) / most.get())
        fine = T.Bind(T.And(nan.get() == f32(0.0), factor < T.reinterpret("float32", T.int32(0x7F800000))))
        by = T.Bind(T.Select(fine, factor, f32(0.0)))

        def code(v: Expr, lanes: int) -> Expr:
            scaled = T.call_llvm_pure_intrin(floats(lanes), "llvm.nearbyint", v * vector(by, lanes))
            whole_number = T.cast(scaled, "int32" if lanes == 1 else f"int32x{lanes}")
            return T.Select(vector(fine, lanes), whole_number, vector(T.int32(0), lanes))

        added = Local(vector(T.int32(0), LANES), LANES, "int32")
        with T.serial(int64(0), int64(width // LANES)) as i:
            at = T.Bind(start + i * LANES)
            codes = T.Bind(code(x.load(m, at, lanes=LANES), LANES))
            added.set(added.get() + codes)
            values.store(T.cast(codes, f"int8x{LANES}"), m, at, lanes=LANES)
        sum_of = Local(T.call_llvm_pure_intrin("int32", "llvm.vector.reduce.add", added.get()), dtype="int32")
        for c in range(width // LANES * LANES, width):
            one = T.Bind(code(x.load(m, start + int64(c)), 1))
            sum_of.set(sum_of.get() + one)
            values.store(T.cast(one, "int8"), m, start + int64(c))
        none = T.Select(nan.get() == f32(0.0), f32(0.0), nan.get())
        scales.store(T.Select(fine, most.get() / f32(127.0), none), m, g)
        sums.store(sum_of.get(), m, g)

    def row(m: Expr) -> None:
        if whole:
            with T.serial(int64(0), int64(whole)) as g:
                quantize(m, g, group)
        if size % group:
            quantize(m, int64(whole), size % group)
        for c in range(size, -(-size // 4) * 4):
            values.store(T.int8(0), m, int64(c))

    k.each(x.extent(0), 8 * size, row)


def integer_product(
    k: Kernel,
    given: Sequence[Memory],
    weight: Memory,
    use: WeightUse,
    factors: Sequence[Memory],
    product: Product,
    rows: Expr,
    first: Expr | None = None,
) -> None:
    """``given``: words of 4 values, scales and sums; ``factors``: the weight's scales, and offsets if it has them."""
    words, scales, sums = given
    attrs, dots = k.step.attrs, Dots(k.level)
    columns, depth = (size.constant for size in weight.shape)
    of_weights, of_values = int(attrs["weight_group"]), int(attrs["activation_group"])
    size = of_weights or of_values or depth
    groups, step = -(-depth // size), DEPTHS[use.layout]
    steps, per_group = -(-depth // step), -(-size // step)
    own_sums = bool(of_weights) and not of_values and groups > 1
    lanes = dots.lanes
    rows_of_scales = groups if of_weights else 1
    across = range(0, PANEL // lanes, dots.vectors)

    def factor(memory: Memory, panel: Expr, g: Expr, v: int) -> Expr:
        at = memory.base + (panel * int64(rows_of_scales) + g) * int64(PANEL) + int64(v * lanes)
        return half_to_float(load(memory.buffer, at, lanes), lanes)

    def block(r: int, p: int, row: Expr, panel: Expr) -> None:
        for start in across:
            parts = [start + v for v in range(dots.vectors)]
            results = [[Local(vector(f32(0.0), lanes), lanes) for _ in parts] for _ in range(r)]
            base = T.Bind(weight.base + panel * int64(PANEL * steps))
            with T.serial(int64(0), int64(groups)) as g:
                counted = [Local(vector(T.int32(0), lanes), lanes, "int32") for _ in range(r)] if own_sums else []
                at_group = g if of_values else int64(0)
                number = [T.Bind(sums.load(row + int64(j), at_group)) for j in range(r)]
                begin = [T.Bind(n * T.int32(0 if own_sums else -BIAS[use.dtype])) for n in number]
                totals = [[Local(vector(begin[j], lanes), lanes, "int32") for _ in parts] for j in range(r)]
                end = T.Bind(T.min((g + int64(1)) * int64(per_group), int64(steps)))
                for i in along_depth(k, T.Bind(g * int64(per_group)), end):
                    at = T.Bind(base + i * int64(PANEL))
                    loaded = [T.Bind(load(weight.buffer, at + int64(v * lanes), lanes)) for v in parts]
                    for half in range(step // 4):
                        bytes_of = [dots.weights(w if step == 4 else dots.nibbles(w, half)) for w in loaded]
                        for j in range(r):
                            word = words.load(row + int64(j), i * int64(step // 4) + int64(half))
                            value = dots.values(T.Bind(T.broadcast(word, lanes)))
                            for s, w in zip(totals[j], bytes_of, strict=True):
                                s.set(dots.dot(s.get(), w, value))
                            if own_sums:
                                counted[j].set(dots.dot(counted[j].get(), dots.ones(), value))
                for v, part in enumerate(parts):
                    by: Expr | None = T.Bind(factor(factors[0], panel, g, part)) if of_weights else None
                    for j in range(r):
                        whole = totals[j][v].get()
                        if own_sums:
                            whole = whole - counted[j].get() * vector(T.int32(BIAS[use.dtype]), lanes)
                        value = T.Bind(T.cast(whole, floats(lanes)))
                        each = T.Bind(vector(scales.load(row + int64(j), at_group), lanes)) if of_values else None
                        both = by * each if by is not None and each is not None else by if by is not None else each
                        result = results[j][v]
                        result.set(value if both is None else T.fma(value, both, result.get()))
                        if len(factors) > 1:
                            assert each is not None or groups == 1
                            scale = each if each is not None else vector(scales.load(row + int64(j), int64(0)), lanes)
                            counts = vector(T.cast(number[j], "float32"), lanes) * scale
                            result.set(T.fma(counts, factor(factors[1], panel, g, part), result.get()))
            for v, part in enumerate(parts):
                by = T.Bind(factor(factors[0], panel, int64(0), part)) if not of_weights else None
                for j in range(r):
                    result = results[j][v]
                    each = vector(scales.load(row + int64(j), int64(0)), lanes) if not of_values else None
                    both = by * each if by is not None and each is not None else by if by is not None else each
                    if both is not None:
                        result.set(result.get() * both)
                    column = panel * int64(PANEL) + int64(part * lanes)
                    product.store_vector(result, row + int64(j), column, columns)

    over_panels(k, rows, columns, block, first=first)


def _quantized_linear(k: Kernel) -> None:
    (_, scales, sums, weight, *rest), words = k.inputs, k.words(k.step.inputs[0])
    use = k.use(3)
    k.check_layout(use, "panel32x4", "panel32x8")
    count = 2 if k.step.attrs.get("has_offsets") else 1
    product = Product.of(k, rest[count:])
    integer_product(k, (words, scales, sums), weight, use, rest[:count], product, words.extent(0))


def _quantized_grouped_linear(k: Kernel) -> None:
    (_, scales, sums, starts, weight, *rest), words = k.inputs, k.words(k.step.inputs[0])
    use = k.use(4)
    k.check_layout(use, "panel32x4", "panel32x8")
    count = 2 if k.step.attrs.get("has_offsets") else 1
    experts, columns, depth = (size.constant for size in weight.shape)
    panels, step = -(-columns // PANEL), DEPTHS[use.layout]

    def one(e: Expr, first: Expr, rows: Expr) -> None:
        def of(memory: Memory, size: int) -> Memory:
            return replace(memory, base=memory.base + e * int64(size), shape=memory.shape[1:])

        panels_of_expert = of(weight, panels * PANEL * -(-depth // step))
        factors = [of(f, panels * PANEL * f.shape[-1].constant) for f in rest[:count]]
        product = Product.of(k, rest[count:], e)
        integer_product(k, (words, scales, sums), panels_of_expert, use, factors, product, rows, first)

    expert_rows(starts, experts, one)


# ---- tables


def _quantized_embedding(k: Kernel) -> None:
    ids, table, scales, *offsets = k.inputs
    out, use = k.outputs[0], k.use(1)
    k.check_layout(use, "panel32x4", "panel32x8")
    size, step = out.shape[-1].constant, DEPTHS[use.layout]
    group = int(k.step.attrs["group_size"]) or size
    groups, steps = -(-size // group), -(-size // step)

    def row(t: Expr) -> None:
        number = T.Bind(T.cast(ids.load(t), "int64"))
        panel, lane = T.Bind(T.floordiv(number, int64(PANEL))), T.Bind(T.floormod(number, int64(PANEL)))
        with T.serial(int64(0), int64(size)) as c:
            i = T.Bind(T.floordiv(c, int64(step)))
            word = load(table.buffer, (panel * int64(steps) + i) * int64(PANEL) + lane)
            place = T.Bind(T.cast(c - i * int64(step), "int32"))
            if step == 4:
                code = T.bitwise_and(word >> (place * T.int32(8)), T.int32(255))
            else:
                high = T.Select(place >= T.int32(4), T.int32(4), T.int32(0))
                code = T.bitwise_and(word >> (T.bitwise_and(place, T.int32(3)) * T.int32(8) + high), T.int32(15))
            at = (panel * int64(groups) + T.floordiv(c, int64(group))) * int64(PANEL) + lane
            value = T.cast(code - T.int32(BIAS[use.dtype]), "float32") * half_to_float(load(scales.buffer, at), 1)
            if offsets:
                value = value + half_to_float(load(offsets[0].buffer, at), 1)
            out.store(value, t, c)

    k.each(ids.extent(0), 16 * size, row)


def embedding(k: Kernel) -> None:
    """Reads rows of a table of floats."""
    dtype = k.use(1).dtype if k.step.inputs[1].kind == "weight" else "f32"
    {"bf16": _bf16_embedding, "fp8": _fp8_embedding}.get(dtype, float_embedding)(k)


def _bf16_embedding(k: Kernel) -> None:
    ids, table = k.inputs
    out, use = k.outputs[0], k.use(1)
    size = out.shape[-1].constant
    pairs = -(-size // 2)

    def row(t: Expr) -> None:
        number = T.Bind(T.cast(ids.load(t), "int64"))
        panel, lane = T.floordiv(number, int64(PANEL)), T.floormod(number, int64(PANEL))
        start = T.Bind(panel * int64(PANEL * pairs) + lane)
        with T.serial(int64(0), int64(size)) as c:
            if use.layout == "rows":
                bits = T.cast(table.load(number, c), "int32") << T.int32(16)
            else:
                word = load(table.buffer, start + T.floordiv(c, int64(2)) * int64(PANEL))
                bits = (word >> (T.cast(T.floormod(c, int64(2)), "int32") * T.int32(16))) << T.int32(16)
            out.store(T.reinterpret("float32", bits), t, c)

    k.each(ids.extent(0), 4 * size, row)


def _fp8_embedding(k: Kernel) -> None:
    ids, table, scales = k.inputs
    out = k.outputs[0]
    k.check_layout(k.use(1), "panel32")
    size = out.shape[-1].constant
    group = int(k.step.attrs["group_size"]) or size
    groups = -(-size // group)

    def row(t: Expr) -> None:
        number = T.Bind(T.cast(ids.load(t), "int64"))
        panel, lane = T.Bind(T.floordiv(number, int64(PANEL))), T.Bind(T.floormod(number, int64(PANEL)))
        with T.serial(int64(0), int64(size)) as c:
            value = fp8_to_float(load(table.buffer, (panel * int64(size) + c) * int64(PANEL) + lane), 1)
            at = (panel * int64(groups) + T.floordiv(c, int64(group))) * int64(PANEL) + lane
            out.store(value * half_to_float(load(scales.buffer, at), 1), t, c)

    k.each(ids.extent(0), 16 * size, row)


HANDLERS: Mapping[str, Handler] = {
    "embedding": embedding,
    "cast_bf16": _cast_bf16,
    "quantize_activation": _quantize_activation,
    "quantized_linear": _quantized_linear,
    "quantized_grouped_linear": _quantized_grouped_linear,
    "quantized_embedding": _quantized_embedding,
}
