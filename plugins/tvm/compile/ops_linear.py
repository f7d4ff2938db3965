"""Writes products with weights of floats: blocks of sums in registers, over panels of 32 columns.

x [M, K] in rows     weight [ceil(N/32)][K][32]     every sum is one chain over K, whatever the blocks are
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm.tirx.script.builder import ir as T

from enginewright.runtime.shared.lowered_program import WeightUse
from enginewright.runtime.shared.panel_layouts import PANEL

from .kernel import LANES, Expr, Handler, Kernel, Local, Memory, f32, int64, load, vector
from .vector_math import ACTIVATIONS, first_of_pair, fp8_to_float, half_to_float, second_of_pair

_SUMS = 24
"""The most vectors of sums in a block of a few rows."""


@dataclass
class Product:
    """The operands of a product that its epilogue reads and writes; ``store`` is the epilogue."""

    out: Memory
    bias: Memory | None
    residual: Memory | None
    activation: str
    expert: tuple[Expr, ...] = ()

    @classmethod
    def of(cls, k: Kernel, rest: Sequence[Memory], *expert: Expr) -> Product:
        """Returns the epilogue of a kernel's step.

        Args:
            k: the kernel.
            rest: the operands after the weight with its scales and offsets.
            expert: the index of the row of biases, if the product is an expert's.
        """
        operands = list(rest)
        residual = operands.pop() if k.step.attrs.get("has_residual") else None
        bias = operands.pop(0) if operands else None
        return cls(k.outputs[0], bias, residual, str(k.step.attrs.get("activation", "")), expert)

    def store(self, value: Expr, row: Expr, column: Expr, lanes: int) -> None:
        if self.bias is not None:
            value = value + self.bias.load(*self.expert, column, lanes=lanes)
        if self.activation:
            value = ACTIVATIONS[self.activation](T.Bind(value), lanes)
        if self.residual is not None:
            value = value + self.residual.load(row, column, lanes=lanes)
        self.out.store(value, row, column, lanes=lanes)

    def store_vector(self, sums: Local, row: Expr, column: Expr, columns: int) -> None:
        """Applies the epilogue to a vector of sums and stores its lanes from ``column`` on, up to the last of
        ``columns`` columns.
        """
        width = sums.width
        if columns % PANEL == 0:
            self.store(sums.get(), row, column, width)
            return
        with T.If(column + int64(width) <= int64(columns)):
            with T.Then():
                self.store(sums.get(), row, column, width)
            with T.Else():
                lanes = sums.lanes()
                for lane in range(columns % width):
                    with T.If(column + int64(lane) < int64(columns)), T.Then():
                        self.store(lanes[int64(lane)], row, column + int64(lane), 1)


def choose(value: Expr, options: Sequence[int], body: Callable[[int], None]) -> None:
    """Writes code that runs ``body(option)`` for the option that equals ``value``; if none does, for the last
    option.
    """
    *others, last = options
    if not others:
        body(last)
        return
    with T.If(value == int64(options[0])):
        with T.Then():
            body(options[0])
        with T.Else():
            choose(value, options[1:], body)


def over_panels(
    k: Kernel,
    rows: Expr,
    columns: int,
    block: Callable[[int, int, Expr, Expr], None],
    *,
    first: Expr | None = None,
    streams: Callable[[int], int] = lambda r: 1,
) -> None:
    """Writes loops that call block(R, P, row, panel) for blocks of R rows and P panels, which cover the result.

    ``row`` and ``panel`` are the first of a block. The blocks depend only on the number of rows.

    Args:
        k: the step's kernel.
        rows: the number of rows.
        columns: the number of columns.
        block: writes the code of a block.
        first: the first row; None for row 0.
        streams: returns the number of panels of a block, for its number of rows.
    """
    most, panels = min(k.level.rows, k.schedule.rows), -(-columns // PANEL)
    groups = min(panels, k.schedule.groups)
    begin = int64(0) if first is None else first
    with T.parallel(int64(0), int64(groups)) as g:
        start = T.Bind(T.floordiv(g * int64(panels), int64(groups)))
        stop = T.Bind(T.floordiv((g + int64(1)) * int64(panels), int64(groups)))

        def few(r: int) -> None:
            width = streams(r)
            whole = T.Bind(T.floordiv(stop - start, int64(width)))
            if width > 1:
                with T.serial(int64(0), whole) as i:
                    block(r, width, begin, start + i * int64(width))
            with T.serial(start + whole * int64(width) if width > 1 else start, stop) as panel:
                block(r, 1, begin, panel)

        def many() -> None:
            blocks = T.Bind(T.ceildiv(rows, int64(k.schedule.row_block)))
            with T.serial(int64(0), blocks) as b:
                row = T.Bind(T.floordiv(rows * b, blocks))
                count = T.Bind(T.floordiv(rows * (b + int64(1)), blocks) - row)
                tiles = T.Bind(T.ceildiv(count, int64(most)))
                with T.serial(start, stop) as panel, T.serial(int64(0), tiles) as tile:
                    at = T.Bind(T.floordiv(count * tile, tiles))
                    size = T.Bind(T.floordiv(count * (tile + int64(1)), tiles) - at)
                    sizes = range(most, (most + 1) // 2 - 1, -1)
                    choose(size, sizes, lambda r: block(r, 1, begin + row + at, panel))

        with T.If(rows <= int64(most)):
            with T.Then(), T.If(rows > int64(0)), T.Then():
                choose(rows, range(1, most + 1), few)
            with T.Else():
                many()


def along_depth(k: Kernel, start: Expr, stop: Expr) -> Iterator[Expr]:
    """Writes loops over the indices from ``start`` to before ``stop``, and yields the index within each loop.

    The body of the caller's ``for`` statement writes the body of the loops. It runs several times, since loops are
    unrolled.
    """
    times = k.schedule.unroll
    if times > 1:
        whole = T.Bind(T.floordiv(stop - start, int64(times)))
        with T.serial(int64(0), whole) as n:
            first = T.Bind(start + n * int64(times))
            for j in range(times):
                yield first + int64(j)
        start = start + whole * int64(times)
    with T.serial(start, stop) as i:
        yield i


def streams(k: Kernel, r: int) -> int:
    """Returns the number of panels that a block of r rows reads at a time."""
    return max(1, min(k.schedule.streams, _SUMS // (2 * r))) if k.level.vectors == 2 else 1


def _linear(k: Kernel) -> None:
    x, weight, *rest = k.inputs
    use = k.use(1)
    if use.dtype == "bf16":
        k.check_layout(use, "panel32x2")
        bf16_product(k, k.words(k.step.inputs[0]), weight, Product.of(k, rest), x.extent(0))
        return
    scales = rest.pop(0) if use.dtype == "fp8" else None
    _float_product(k, x, weight, use, scales, Product.of(k, rest), x.extent(0))


def grouped_linear(k: Kernel) -> None:
    """Writes the product of each expert's rows with the expert's weight."""
    x, starts, weight, *rest = k.inputs
    use = k.use(2)
    experts, columns, depth = (size.constant for size in weight.shape)
    padded = -(-columns // PANEL) * PANEL
    scales = rest.pop(0) if use.dtype == "fp8" else None

    def one(e: Expr, first: Expr, rows: Expr) -> None:
        def own(memory: Memory, size: int) -> Memory:
            return replace(memory, base=memory.base + e * int64(size), shape=memory.shape[1:])

        product = Product.of(k, rest, e)
        if use.dtype == "bf16":
            k.check_layout(use, "panel32x2")
            words = k.words(k.step.inputs[0])
            bf16_product(k, words, own(weight, padded * -(-depth // 2)), product, rows, first)
            return
        own_scales = own(scales, padded * scales.shape[-1].constant) if scales is not None else None
        _float_product(k, x, own(weight, padded * depth), use, own_scales, product, rows, first)

    expert_rows(starts, experts, one)


def expert_rows(starts: Memory, experts: int, body: Callable[[Expr, Expr, Expr], None]) -> None:
    """Writes a loop over experts that calls body(expert, its first row, its number of rows)."""
    with T.serial(int64(0), int64(experts)) as e:
        first = T.Bind(T.cast(starts.load(e), "int64"))
        body(e, first, T.Bind(T.cast(starts.load(e + int64(1)), "int64") - first))


def _zero_sums(rows: int, vectors: int) -> list[list[Local]]:
    """Returns variables of 0 for the sums of a block: [rows][vectors of columns]."""
    return [[Local(vector(f32(0.0), LANES), LANES) for _ in range(vectors)] for _ in range(rows)]


def _store_sums(
    product: Product,
    sums: Sequence[Sequence[Local]],
    vectors: Sequence[tuple[int, int]],
    row: Expr,
    panel: Expr,
    columns: int,
) -> None:
    """Writes the epilogue of a block's sums, [row][vector]. ``row`` and ``panel`` are the first of the block.

    ``vectors`` has the place of each vector: (panel, counted from ``panel``; index in the panel). ``columns`` is the
    product's number of columns.
    """
    for j, of_row in enumerate(sums):
        for s, (q, v) in zip(of_row, vectors, strict=True):
            column = (panel + int64(q)) * int64(PANEL) + int64(v * LANES)
            product.store_vector(s, row + int64(j), column, columns)


def _float_product(
    k: Kernel,
    x: Memory,
    weight: Memory,
    use: WeightUse,
    scales: Memory | None,
    product: Product,
    rows: Expr,
    first: Expr | None = None,
) -> None:
    """Writes the product with a weight of floats, for ``rows`` rows from ``first`` on (None: from row 0).

    ``scales`` are those of an fp8 weight, in groups along K; None for other weights.
    """
    k.check_layout(use, "panel32")
    columns, depth = (size.constant for size in weight.shape)
    size = int(k.step.attrs.get("weight_group", 0)) or depth
    groups = -(-depth // size)
    halves = range(0, PANEL // LANES, k.level.vectors)

    def block(r: int, p: int, row: Expr, panel: Expr) -> None:
        for half in halves:
            vectors = [(i, half + v) for i in range(p) for v in range(k.level.vectors)]
            sums = _zero_sums(r, len(vectors))
            base = T.Bind(weight.base + panel * int64(PANEL * depth))

            with T.serial(int64(0), int64(groups)) as g:  # one, of floats of 32 bits
                factors: list[Expr] = []
                for q, v in vectors:
                    if scales is None:
                        continue
                    at = ((panel + int64(q)) * int64(groups) + g) * int64(PANEL) + int64(v * LANES)
                    factors.append(T.Bind(half_to_float(load(scales.buffer, scales.base + at, LANES), LANES)))
                end = T.Bind(T.min((g + int64(1)) * int64(size), int64(depth)))
                for i in along_depth(k, T.Bind(g * int64(size)), end):
                    start = T.Bind(base + i * int64(PANEL))
                    places = [start + int64(q * PANEL * depth + v * LANES) for q, v in vectors]
                    loaded = [load(weight.buffer, place, LANES) for place in places]
                    if factors:
                        loaded = [fp8_to_float(w, LANES) * factor for w, factor in zip(loaded, factors, strict=True)]
                    loaded = [T.Bind(w) for w in loaded]
                    for j in range(r):
                        value = T.Bind(T.broadcast(x.load(row + int64(j), i), LANES))
                        for s, w in zip(sums[j], loaded, strict=True):
                            s.set(T.fma(value, w, s.get()))
            _store_sums(product, sums, vectors, row, panel, columns)

    over_panels(k, rows, columns, block, first=first, streams=lambda r: streams(k, r))


def bf16_product(
    k: Kernel, words: Memory, weight: Memory, product: Product, rows: Expr, first: Expr | None = None
) -> None:
    """Writes a product of bf16 values.

    Args:
        k: the step's kernel.
        words: the activations, rows of pairs; a pair is two steps of a sum.
        weight: the weight [N, K], in panels of pairs.
        product: the epilogue, which gets the sums.
        rows: the number of rows.
        first: the first row; None for 0.
    """
    columns, depth = (size.constant for size in weight.shape)
    pairs = -(-depth // 2)
    halves = range(0, PANEL // LANES, k.level.vectors)

    def block(r: int, p: int, row: Expr, panel: Expr) -> None:
        for half in halves:
            vectors = [(i, half + v) for i in range(p) for v in range(k.level.vectors)]
            sums = _zero_sums(r, len(vectors))
            base = T.Bind(weight.base + panel * int64(PANEL * pairs))
            for i in along_depth(k, int64(0), int64(pairs)):
                at = T.Bind(base + i * int64(PANEL))
                loaded = [
                    T.Bind(load(weight.buffer, at + int64(q * PANEL * pairs + v * LANES), LANES)) for q, v in vectors
                ]
                row_words = [T.Bind(words.load(row + int64(j), i)) for j in range(r)]
                for part in (first_of_pair, second_of_pair):
                    weights = [T.Bind(part(w, LANES)) for w in loaded]
                    for j in range(r):
                        value = T.Bind(T.broadcast(part(row_words[j], 1), LANES))
                        for s, w in zip(sums[j], weights, strict=True):
                            s.set(T.fma(value, w, s.get()))
            _store_sums(product, sums, vectors, row, panel, columns)

    over_panels(k, rows, columns, block, first=first, streams=lambda r: streams(k, r))


HANDLERS: Mapping[str, Handler] = {"linear": _linear, "grouped_linear": grouped_linear}
