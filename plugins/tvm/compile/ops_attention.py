"""Writes attention over block tables as in FlashAttention: 32 keys at a time, with running maxima and sums.

Dao et al., https://arxiv.org/abs/2205.14135.

    keys [P][Nkv][D][32]    values [P][Nkv][32][Dv]    blocks begin at multiples of 32 for every token

Rows are the queries of neighbouring tokens, with the query heads that share keys. The result of a row doesn't depend on
the batch: a block without visible keys doesn't change it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from .kernel import LANES, Expr, Handler, Kernel, Local, Memory, f32, int64, lanes_of, load, on_stack, store, vector
from .ops_rows import total
from .vector_math import exp, tanh

NONE = -1e30
"""The score of a key that isn't visible, which is less than any other."""


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

    def end(self, request: Expr) -> Expr:
        """Returns the index of the token after a request's last one in the step."""
        return T.cast(self.q_start.load(request + int64(1)), "int64")


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
            with T.While(a.end(request.get()) <= token.get()):
                request.set(request.get() + int64(1))
            b, first = T.Bind(request.get()), T.Bind(token.get())
            stop = T.Bind(a.end(b))
            last = T.Bind(T.min(stop, end))
            length = T.Bind(T.cast(a.kv_len.load(b), "int64"))
            position = T.Bind(length - stop + first)
            with T.serial(int64(0), int64(heads // together)) as part:
                at = T.Bind(head * int64(heads) + part * int64(together))
                tile = Tile(b, head, at, together, first, last, position)
                with T.If(last - first == int64(1)):
                    with T.Then():
                        _TileLoops(k, a, tile, 1).write()
                    with T.Else():
                        if tokens > 1:
                            _TileLoops(k, a, tile, tokens).write()
                        else:
                            T.evaluate(int64(0))
            token.set(last)


@dataclass
class Tile:
    """Neighbouring tokens of a request, with some of the query heads that read one key/value head.

    Attributes:
        request: the request's index in the step.
        kv_head: the key/value head.
        head: the first query head.
        heads: the number of query heads.
        first, stop: the first token, and the one after the last.
        position: the position of the first token in its request.
    """

    request: Expr
    kv_head: Expr
    head: Expr
    heads: int
    first: Expr
    stop: Expr
    position: Expr


class _TileLoops:
    """Writes the loops of a tile with at most ``tokens`` tokens. A row is a token with a head; all rows see the same
    keys.

    If the tile has fewer tokens, the last token is computed and stored several times.
    """

    def __init__(self, k: Kernel, a: Attention, tile: Tile, tokens: int) -> None:
        self.k, self.a, self.tile = k, a, tile
        self.keys, self.values, group = k.cache()
        self.cached, self.depth, self.channels, self.size = group.sizes
        attrs = k.step.attrs
        self.scale, self.softcap = float(attrs["scale"]), float(attrs["softcap"])
        self.window = int(attrs["window"])
        self.rows = [(t, h) for t in range(tokens) for h in range(tile.heads)]
        first = tile.first
        self.token = [T.Bind(T.min(first + int64(t), tile.stop - int64(1))) for t in range(tokens)]
        self.place = [T.Bind(tile.position + self.token[t] - first) for t in range(tokens)]
        self.greatest = [Local(f32(NONE)) for _ in self.rows]
        self.sums = [Local(vector(f32(0.0), LANES), LANES) for _ in self.rows]
        self.powers = [on_stack(self.size) for _ in self.rows]
        self.results = [[Local(vector(f32(0.0), n), n) for _, n in lanes_of(self.channels)] for _ in self.rows]

    def write(self) -> None:
        """Writes the loop over the blocks of keys that the tile sees, and stores the results of its rows."""
        size, first, last = self.size, self.place[0], self.place[-1]
        begin = T.floordiv(T.max(first - int64(self.window - 1), int64(0)), int64(size)) if self.window else int64(0)
        end = T.Bind(T.floordiv(last, int64(size)) + int64(1))
        with T.serial(T.Bind(begin), end) as block:
            piece = T.cast(self.a.table.buffer[self.tile.request, block], "int64") * int64(self.cached)
            piece = piece + self.tile.kv_head
            key_at, value_at = T.Bind(piece * int64(size * self.depth)), T.Bind(piece * int64(size * self.channels))
            scores = self._scores(key_at)
            factors = [self._softmax(i, scores[i], block) for i in range(len(self.rows))]
            for i, factor in enumerate(factors):
                for (_, n), result in zip(lanes_of(self.channels), self.results[i], strict=True):
                    result.set(result.get() * vector(factor, n))
            self._add_values(value_at, block)
        for i, (t, h) in enumerate(self.rows):
            head = self.tile.head + int64(h)
            _store(self.a, self.token[t], head, self.greatest[i], self.sums[i], self.results[i], self.channels)

    def _scores(self, key_at: Expr) -> list[list[Local]]:
        """Writes the products of the queries and the keys of a block. Returns a sum for each row and vector of keys:
        [rows][vectors].

        ``key_at`` is the block's offset in the keys.
        """
        vectors = range(self.size // LANES)
        scores = [[Local(vector(f32(0.0), LANES), LANES) for _ in vectors] for _ in self.rows]
        with T.serial(int64(0), int64(self.depth)) as d:
            places = [key_at + d * int64(self.size) + int64(v * LANES) for v in vectors]
            loaded = [T.Bind(load(self.keys, place, LANES)) for place in places]
            for i, (t, h) in enumerate(self.rows):
                query = T.Bind(T.broadcast(self.a.q.load(self.token[t], self.tile.head + int64(h), d), LANES))
                for s, key in zip(scores[i], loaded, strict=True):
                    s.set(T.fma(query, key, s.get()))
        return scores

    def _masked(self, i: int, v: int, score: Local, block: Expr) -> Expr:
        """Scales and masks vector ``v`` of the scores of row ``i``. Returns a mask that is True for keys that the row
        attends to.
        """
        t, h = self.rows[i]
        number = T.Bind(T.ramp(T.cast(block * int64(self.size) + int64(v * LANES), "int32"), T.int32(1), LANES))
        at = T.Bind(T.broadcast(T.cast(self.place[t], "int32"), LANES))
        value = score.get() * vector(f32(self.scale), LANES)
        if self.softcap:
            cap = vector(f32(self.softcap), LANES)
            value = tanh(value / cap, LANES) * cap
        if self.a.slopes is not None:
            slope = T.broadcast(self.a.slopes.load(self.tile.head + int64(h)), LANES)
            value = value + slope * T.cast(number - at, f"float32x{LANES}")
        visible = number <= at
        if self.window:
            visible = T.And(visible, number > at - T.broadcast(T.int32(self.window), LANES))
        score.set(T.Select(visible, value, vector(f32(NONE), LANES)))
        return visible

    def _softmax(self, i: int, scores: Sequence[Local], block: Expr) -> Expr:
        """Stores the exponentials of the scores of row ``i`` for a block, relative to the row's largest score so far.

        Returns the factor that makes the results of earlier blocks relative to the same score.
        """
        seen = [self._masked(i, v, s, block) for v, s in enumerate(scores)]
        highest = T.Bind(_largest([s.get() for s in scores]))
        now = T.Bind(T.max(self.greatest[i].get(), highest))
        factor = T.Bind(exp(self.greatest[i].get() - now, 1))
        self.greatest[i].set(now)
        added = self.sums[i].get() * T.broadcast(factor, LANES)
        for v, (s, visible) in enumerate(zip(scores, seen, strict=True)):
            power = T.Bind(T.Select(visible, exp(s.get() - T.broadcast(now, LANES), LANES), vector(f32(0), LANES)))
            store(self.powers[i], int64(v * LANES), power, LANES)
            added = added + power
        self.sums[i].set(added)
        return factor

    def _add_values(self, value_at: Expr, block: Expr) -> None:
        """Adds a block's values, multiplied by the exponentials, to the results. Values after the last token aren't
        read, as they may be anything.
        """
        limit = T.Bind(T.min(int64(self.size), self.place[-1] + int64(1) - block * int64(self.size)))
        pieces = list(enumerate(lanes_of(self.channels)))
        together = max(1, self.k.level.rows * self.k.level.vectors // len(self.rows))
        for start in range(0, len(pieces), together):
            with T.serial(int64(0), limit) as j:
                for number, (c, n) in pieces[start : start + together]:
                    value = T.Bind(load(self.values, value_at + j * int64(self.channels) + int64(c), n))
                    for i in range(len(self.rows)):
                        result = self.results[i][number]
                        result.set(T.fma(vector(self.powers[i][j], n), value, result.get()))


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
