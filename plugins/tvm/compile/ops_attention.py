"""Attention over block tables, as FlashAttention goes over keys: a block of 32 at a time with running maxima and sums
(Dao et al., https://arxiv.org/abs/2205.14135).

    keys [P][Nkv][D][32]    values [P][Nkv][32][Dv]    a block is at the same places for every token that sees it

Rows are the queries of neighbouring tokens with the heads that share keys. A row's steps are the same in any batch:
a block that lies outside of what it sees changes nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from .kernel import LANES, Expr, Handler, Kernel, Local, Memory, f32, int64, lanes_of, load, on_stack, store, vector
from .ops_rows import total
from .vector_math import exp, tanh

NONE = -1e30
"""Less than any score: of a key that isn't seen."""


@dataclass
class Attention:
    """The operands of a step's attention."""

    q: Memory
    table: Memory
    q_start: Memory
    kv_len: Memory
    sinks: Memory | None
    slopes: Memory | None
    out: Memory

    @classmethod
    def from_kernel(cls, k: Kernel) -> Attention:
        q, table, q_start, kv_len, *rest = k.inputs
        sinks = rest.pop(0) if k.step.attrs.get("has_sinks") else None
        slopes = rest.pop(0) if k.step.attrs.get("has_slopes") else None
        return cls(q, table, q_start, kv_len, sinks, slopes, k.outputs[0])


def _paged_attention(k: Kernel) -> None:
    a = Attention.from_kernel(k)
    cached = k.cache()[2].planes[0].heads
    heads = a.q.shape[1].constant // cached
    together = next(n for n in range(min(heads, k.level.rows), 0, -1) if heads % n == 0)
    tokens = max(1, k.level.rows // together)
    count = a.q.extent(0)
    width = T.Bind(T.Select(count == a.kv_len.extent(0), int64(1), int64(tokens)))  # when decoding a tile is a token
    tiles = T.Bind(T.ceildiv(count, width))
    with T.parallel(int64(0), tiles * int64(cached)) as task:
        head = T.Bind(T.floormod(task, int64(cached)))
        token = Local(T.floordiv(task, int64(cached)) * width, dtype="int64")
        end = T.Bind(T.min(token.get() + width, count))
        request = Local(int64(0), dtype="int64")
        with T.While(token.get() < end):
            with T.While(T.cast(a.q_start.load(request.get() + int64(1)), "int64") <= token.get()):
                request.set(request.get() + int64(1))
            b, first = T.Bind(request.get()), T.Bind(token.get())
            stop = T.Bind(T.cast(a.q_start.load(b + int64(1)), "int64"))
            last = T.Bind(T.min(stop, end))
            length = T.Bind(T.cast(a.kv_len.load(b), "int64"))
            position = T.Bind(length - stop + first)
            with T.serial(int64(0), int64(heads // together)) as part:
                at = T.Bind(head * int64(heads) + part * int64(together))
                tile = Tile(b, head, at, together, first, last, position)
                with T.If(last - first == int64(1)):
                    with T.Then():
                        _rows(k, a, tile, 1)
                    with T.Else():
                        if tokens > 1:
                            _rows(k, a, tile, tokens)
                        else:
                            T.evaluate(int64(0))
            token.set(last)


@dataclass
class Tile:
    """Neighbouring tokens of a request with some of the query heads that read one key/value head.

    Attributes:
        request: its number in the step.
        kv_head: the key/value head.
        head: the first query head.
        heads: how many there are from it on.
        first, stop: the first token, and the one after the last.
        position: of the first token in its request.
    """

    request: Expr
    kv_head: Expr
    head: Expr
    heads: int
    first: Expr
    stop: Expr
    position: Expr


def _rows(k: Kernel, a: Attention, tile: Tile, tokens: int) -> None:
    """Writes the loops of a tile of at most ``tokens`` tokens: all its rows see the same keys.

    Where there are fewer tokens the last one is computed again, and stored once more.
    """
    head, heads, first = tile.head, tile.heads, tile.first
    keys, values, group = k.cache()
    cached, depth, channels, size = group.sizes
    attrs = k.step.attrs
    scale, window, softcap = float(attrs["scale"]), int(attrs["window"]), float(attrs["softcap"])
    rows = [(t, h) for t in range(tokens) for h in range(heads)]
    token = [T.Bind(T.min(first + int64(t), tile.stop - int64(1))) for t in range(tokens)]
    place = [T.Bind(tile.position + token[t] - first) for t in range(tokens)]
    greatest = [Local(f32(NONE)) for _ in rows]
    sums = [Local(vector(f32(0.0), LANES), LANES) for _ in rows]
    powers = [on_stack(size) for _ in rows]
    results = [[Local(vector(f32(0.0), n), n) for _, n in lanes_of(channels)] for _ in rows]
    begin = T.floordiv(T.max(place[0] - int64(window - 1), int64(0)), int64(size)) if window else int64(0)
    end = T.Bind(T.floordiv(place[-1], int64(size)) + int64(1))
    with T.serial(T.Bind(begin), end) as block:
        piece = T.cast(a.table.buffer[tile.request, block], "int64") * int64(cached) + tile.kv_head
        key_at, value_at = T.Bind(piece * int64(size * depth)), T.Bind(piece * int64(size * channels))
        scores = [[Local(vector(f32(0.0), LANES), LANES) for _ in range(size // LANES)] for _ in rows]
        with T.serial(int64(0), int64(depth)) as d:
            vectors = range(size // LANES)
            loaded = [T.Bind(load(keys, key_at + d * int64(size) + int64(v * LANES), LANES)) for v in vectors]
            for i, (t, h) in enumerate(rows):
                query = T.Bind(T.broadcast(a.q.load(token[t], head + int64(h), d), LANES))
                for s, key in zip(scores[i], loaded, strict=True):
                    s.set(T.fma(query, key, s.get()))
        factors = []
        for i, (t, h) in enumerate(rows):
            seen = []
            for v, s in enumerate(scores[i]):
                number = T.Bind(T.ramp(T.cast(block * int64(size) + int64(v * LANES), "int32"), T.int32(1), LANES))
                at = T.Bind(T.broadcast(T.cast(place[t], "int32"), LANES))
                value = s.get() * vector(f32(scale), LANES)
                if softcap:
                    cap = vector(f32(softcap), LANES)
                    value = tanh(value / cap, LANES) * cap
                if a.slopes is not None:
                    slope = T.broadcast(a.slopes.load(head + int64(h)), LANES)
                    value = value + slope * T.cast(number - at, f"float32x{LANES}")
                visible = number <= at
                if window:
                    visible = T.And(visible, number > at - T.broadcast(T.int32(window), LANES))
                s.set(T.Select(visible, value, vector(f32(NONE), LANES)))
                seen.append(visible)
            highest = T.Bind(_largest([s.get() for s in scores[i]]))
            now = T.Bind(T.max(greatest[i].get(), highest))
            factor = T.Bind(exp(greatest[i].get() - now, 1))
            greatest[i].set(now)
            added = sums[i].get() * T.broadcast(factor, LANES)
            for v, (s, visible) in enumerate(zip(scores[i], seen, strict=True)):
                power = T.Bind(T.Select(visible, exp(s.get() - T.broadcast(now, LANES), LANES), vector(f32(0), LANES)))
                store(powers[i], int64(v * LANES), power, LANES)
                added = added + power
            sums[i].set(added)
            factors.append(factor)
        for i in range(len(rows)):
            for (_, n), result in zip(lanes_of(channels), results[i], strict=True):
                result.set(result.get() * vector(factors[i], n))
        limit = T.Bind(T.min(int64(size), place[-1] + int64(1) - block * int64(size)))
        # What is behind the last token isn't read: it may be anything.
        pieces = list(enumerate(lanes_of(channels)))
        together = max(1, k.level.rows * k.level.vectors // len(rows))
        for start in range(0, len(pieces), together):
            with T.serial(int64(0), limit) as j:
                for number, (c, n) in pieces[start : start + together]:
                    value = T.Bind(load(values, value_at + j * int64(channels) + int64(c), n))
                    for i in range(len(rows)):
                        result = results[i][number]
                        result.set(T.fma(vector(powers[i][j], n), value, result.get()))
    for i, (t, h) in enumerate(rows):
        _store(a, token[t], head + int64(h), greatest[i], sums[i], results[i], channels)


def _store(
    a: Attention, token: Expr, head: Expr, greatest: Local, sums: Local, results: list[Local], channels: int
) -> None:
    whole = total(sums.lanes())
    factor = f32(1.0)
    if a.sinks is not None:
        sink = T.Bind(a.sinks.load(head))
        now = T.Bind(T.max(greatest.get(), sink))
        factor = T.Bind(exp(greatest.get() - now, 1))
        whole = T.Bind(whole * factor + exp(sink - now, 1))
    factor = T.Bind(factor / whole)
    for (c, n), result in zip(lanes_of(channels), results, strict=True):
        a.out.store(result.get() * vector(factor, n), token, head, int64(c), lanes=n)


def _largest(parts: list[Expr]) -> Expr:
    value = parts[0]
    for other in parts[1:]:
        value = T.max(value, other)
    return T.call_llvm_pure_intrin("float32", "llvm.vector.reduce.fmax", value)


HANDLERS: Mapping[str, Handler] = {"paged_attention": _paged_attention}
