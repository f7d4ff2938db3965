"""Writes products with weights of bf16 and of integers, rounding of activations for them, and lookups in tables of
them.

    bf16   panel32x2   a word has 2 neighbours along K of a column    sums are chains of floats, as for weights of f32
    i8     panel32x4   4 bytes of value + 128                         sums are exact integers in each group, then floats
    i4 u4  panel32x8   8 values, the low halves of 4 bytes first      as i8; i4 is stored as value + 8

Every sum has the order that docs/inside/numerics.md describes.
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
    """Writes a cast to the nearest bf16, ties to even. A NaN stays a NaN."""
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


Vectors = list[list[Local]]
"""The sums of a block: one vector for each row and each vector of a panel, [rows][vectors]."""


class IntegerProduct:
    """A product of quantized activations and a quantized weight. ``write`` adds its loops to a kernel.

    If only the weight is in groups, the loops also compute the sums of the activations in each group.

    Args:
        k: the step's kernel.
        given: the activations: words of 4 values, scales and sums.
        weight: the weight's values [N, K], in a layout of panels.
        use: the weight's entry in the program.
        factors: the weight's scales, and its offsets if it has them.
        product: the epilogue, which gets the results.
    """

    def __init__(
        self,
        k: Kernel,
        given: Sequence[Memory],
        weight: Memory,
        use: WeightUse,
        factors: Sequence[Memory],
        product: Product,
    ) -> None:
        self.k, self.weight, self.factors, self.product = k, weight, factors, product
        self.words, self.scales, self.sums = given
        self.dots = Dots(k.level)
        self.columns, depth = (size.constant for size in weight.shape)
        self.weight_groups, self.value_groups = (int(k.step.attrs[f"{of}_group"]) for of in ("weight", "activation"))
        size = self.weight_groups or self.value_groups or depth
        self.depth_step = DEPTHS[use.layout]
        self.bias = BIAS[use.dtype]
        self.groups = -(-depth // size)
        self.steps, self.group_steps = -(-depth // self.depth_step), -(-size // self.depth_step)
        self.own_sums = bool(self.weight_groups) and not self.value_groups and self.groups > 1

    def write(self, rows: Expr, first: Expr | None = None) -> None:
        """Writes the loops over ``rows`` rows, from row ``first`` on; None is row 0."""
        over_panels(self.k, rows, self.columns, self._block, first=first)

    def _block(self, r: int, p: int, row: Expr, panel: Expr) -> None:
        """Writes the product of ``r`` rows, from ``row`` on, with a panel: some vectors of columns at a time."""
        for start in range(0, PANEL // self.dots.lanes, self.dots.vectors):
            parts = [start + v for v in range(self.dots.vectors)]
            results = self._zeros(r, parts)
            base = T.Bind(self.weight.base + panel * int64(PANEL * self.steps))
            with T.serial(int64(0), int64(self.groups)) as g:
                self._add_group(results, parts, row, panel, g, base)
            self._store(results, parts, row, panel)

    def _zeros(self, rows: int, parts: Sequence[int]) -> Vectors:
        lanes = self.dots.lanes
        return [[Local(vector(f32(0.0), lanes), lanes) for _ in parts] for _ in range(rows)]

    def _factor(self, memory: Memory, panel: Expr, g: Expr, part: int) -> Expr:
        """Returns the scales or offsets in ``memory`` for group ``g`` and vector ``part`` of a panel's columns."""
        groups, lanes = self.groups if self.weight_groups else 1, self.dots.lanes
        at = memory.base + (panel * int64(groups) + g) * int64(PANEL) + int64(part * lanes)
        return half_to_float(load(memory.buffer, at, lanes), lanes)

    def _scale(self, row: Expr, g: Expr) -> Expr:
        """Returns the scale of group ``g`` of a row of activations, in all lanes."""
        return vector(self.scales.load(row, g), self.dots.lanes)

    def _add_group(self, results: Vectors, parts: Sequence[int], row: Expr, panel: Expr, g: Expr, base: Expr) -> None:
        """Computes the integer sums of group ``g``, and adds them to ``results``, multiplied by the scales of the
        group.

        ``parts`` has the vectors of the panel's columns; ``base`` is the offset of the panel in the weight.
        """
        lanes, own_sums = self.dots.lanes, self.own_sums
        rows = range(len(results))
        counted = [Local(vector(T.int32(0), lanes), lanes, "int32") for _ in rows] if own_sums else []
        at_group = g if self.value_groups else int64(0)
        number = [T.Bind(self.sums.load(row + int64(j), at_group)) for j in rows]
        begin = [T.Bind(n * T.int32(0 if own_sums else -self.bias)) for n in number]
        totals = [[Local(vector(begin[j], lanes), lanes, "int32") for _ in parts] for j in rows]
        self._sum_integers(totals, counted, parts, row, g, base)
        for v, part in enumerate(parts):
            by = T.Bind(self._factor(self.factors[0], panel, g, part)) if self.weight_groups else None
            for j, result in enumerate(of_row[v] for of_row in results):
                whole = totals[j][v].get()
                if own_sums:
                    whole = whole - counted[j].get() * vector(T.int32(self.bias), lanes)
                value = T.Bind(T.cast(whole, floats(lanes)))
                each = T.Bind(self._scale(row + int64(j), at_group)) if self.value_groups else None
                both = _times(by, each)
                result.set(value if both is None else T.fma(value, both, result.get()))
                if len(self.factors) > 1:
                    assert each is not None or self.groups == 1
                    scale = each if each is not None else self._scale(row + int64(j), int64(0))
                    counts = vector(T.cast(number[j], "float32"), lanes) * scale
                    result.set(T.fma(counts, self._factor(self.factors[1], panel, g, part), result.get()))

    def _sum_integers(
        self,
        totals: Vectors,
        counted: Sequence[Local],
        parts: Sequence[int],
        row: Expr,
        g: Expr,
        base: Expr,
    ) -> None:
        """Adds the products of group ``g`` along K to ``totals``. Adds each row's values to ``counted``, if that isn't
        empty.

        ``parts`` are the indices of the panel's vectors of columns; ``base`` is the panel's position in the weight.
        """
        dots, lanes = self.dots, self.dots.lanes
        end = T.Bind(T.min((g + int64(1)) * int64(self.group_steps), int64(self.steps)))
        for i in along_depth(self.k, T.Bind(g * int64(self.group_steps)), end):
            at = T.Bind(base + i * int64(PANEL))
            loaded = [T.Bind(load(self.weight.buffer, at + int64(v * lanes), lanes)) for v in parts]
            words = self.depth_step // 4
            for half in range(words):
                bytes_of = [dots.weights(w if words == 1 else dots.nibbles(w, half)) for w in loaded]
                for j, of_row in enumerate(totals):
                    word = self.words.load(row + int64(j), i * int64(words) + int64(half))
                    value = dots.values(T.Bind(T.broadcast(word, lanes)))
                    for s, w in zip(of_row, bytes_of, strict=True):
                        s.set(dots.dot(s.get(), w, value))
                    if counted:
                        counted[j].set(dots.dot(counted[j].get(), dots.ones(), value))

    def _store(self, results: Vectors, parts: Sequence[int], row: Expr, panel: Expr) -> None:
        """Multiplies the results by scales that all groups share, if there are any, and writes the epilogue."""
        for v, part in enumerate(parts):
            by = T.Bind(self._factor(self.factors[0], panel, int64(0), part)) if not self.weight_groups else None
            for j, result in enumerate(of_row[v] for of_row in results):
                each = self._scale(row + int64(j), int64(0)) if not self.value_groups else None
                if (both := _times(by, each)) is not None:
                    result.set(result.get() * both)
                column = panel * int64(PANEL) + int64(part * self.dots.lanes)
                self.product.store_vector(result, row + int64(j), column, self.columns)


def _times(a: Expr | None, b: Expr | None) -> Expr | None:
    """Returns the product of two factors. None is a factor that is missing, and None the result if both are."""
    return b if a is None else a if b is None else a * b


def _quantized_linear(k: Kernel) -> None:
    (_, scales, sums, weight, *rest), words = k.inputs, k.words(k.step.inputs[0])
    use = k.use(3)
    k.check_layout(use, "panel32x4", "panel32x8")
    count = 2 if k.step.attrs.get("has_offsets") else 1
    product = Product.of(k, rest[count:])
    IntegerProduct(k, (words, scales, sums), weight, use, rest[:count], product).write(words.extent(0))


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
        IntegerProduct(k, (words, scales, sums), panels_of_expert, use, factors, product).write(rows, first)

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
    """Writes a lookup of rows in a table of floats."""
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
