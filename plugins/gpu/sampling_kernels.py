"""Triton kernels that draw tokens from logits on a GPU, like the cpu target's sampler, but with sums in another order.

Tokens are ordered by logit, the largest first, and equal logits by id. top_k, top_p and min_p each keep a prefix of
that order. So a cut is one position in it: the key of a logit, and the last id among the tokens with that key. A key is
searched four bits at a time (radix selection). Each pass counts the tokens of 16 ranges, or sums their weights, in
parallel pieces of the vocabulary; the next pass first chooses among the ranges.

Shape letters: R rows, V tokens, C pieces of PIECE tokens. ``state`` is [R, PASSES + 1, 3] float64: after each pass, the
key's first bits, and the number and the weight of the tokens above.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NONE = tl.constexpr(-1)  # NO_TOKEN


@triton.jit
def key_of(logits: tl.tensor) -> tl.tensor:
    """Converts float32 to int64 from 0 to 2^32 - 1, in the same order; -0 and 0 have the same key."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + 2147483648)


@triton.jit
def weigh(logits: tl.tensor, top: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Returns exp((logits - top) / temperature); 0 for -infinity."""
    return tl.exp((logits - top) / temperature)


@triton.jit
def largest_kernel(
    logits: tl.tensor,
    values: tl.tensor,
    places: tl.tensor,
    STRIDE: tl.constexpr,
    V: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Finds each piece's largest logit and the first token with it, [R, C] each; grid (R, C).

    For a piece with NaN or +infinity the largest logit is NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row * STRIDE + token, mask=token < V, other=float("-inf")).to(tl.float32)
    bad = tl.sum(((x != x) | (x == float("inf"))).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(x != x, float("-inf"), x), axis=0)
    first = tl.min(tl.where(x == top, token, V), axis=0)
    tl.store(values + row * tl.num_programs(1) + piece, tl.where(bad, float("nan"), top))
    tl.store(places + row * tl.num_programs(1) + piece, first)


@triton.jit
def choose_largest_kernel(
    values: tl.tensor,
    places: tl.tensor,
    tops: tl.tensor,
    tokens: tl.tensor,
    C: tl.constexpr,
    ROOM: tl.constexpr,
) -> None:
    """Reduces the results [R, C] of ``largest_kernel`` to each row's largest logit and its token; grid (R).

    The token is -1 if the row can't be drawn from.
    """
    row = tl.program_id(0)
    piece = tl.arange(0, ROOM)
    x = tl.load(values + row * C + piece, mask=piece < C, other=float("-inf"))
    at = tl.load(places + row * C + piece, mask=piece < C, other=2147483647)
    bad = tl.sum((x != x).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(x != x, float("-inf"), x), axis=0)
    first = tl.min(tl.where(x == top, at, 2147483647), axis=0)
    refused = bad | (top == float("-inf"))
    tl.store(tops + row, tl.where(refused, 0.0, top))
    tl.store(tokens + row, tl.where(refused, _NONE, first))


@triton.jit
def _kept(
    logits: tl.tensor, token: tl.tensor, cut_keys: tl.tensor, cut_tokens: tl.tensor, row: tl.tensor, CUTS: tl.constexpr
) -> tl.tensor:
    """Returns True for each ``token`` with its logit in ``logits`` that the first CUTS cuts of the row keep.

    A cut is the key and the id of the last token that it keeps: ``cut_keys`` and ``cut_tokens``, [2, R].
    """
    key = key_of(logits)
    keep = key >= 0
    rows = tl.num_programs(0)
    for cut in tl.static_range(CUTS):
        border = tl.load(cut_keys + cut * rows + row)
        last = tl.load(cut_tokens + cut * rows + row)
        keep = keep & ((key > border) | ((key == border) & (token <= last)))
    return keep


@triton.jit
def sums_kernel(
    logits: tl.tensor,
    tops: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    cut_keys: tl.tensor,
    cut_tokens: tl.tensor,
    sums: tl.tensor,
    STRIDE: tl.constexpr,
    V: tl.constexpr,
    CUTS: tl.constexpr,
    MIN_P: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Sums the weights of the tokens in each piece that the cuts keep -> sums float64 [R, C]; grid (R, C)."""
    row = tl.program_id(0)
    piece = tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row.to(tl.int64) * STRIDE + token, mask=token < V, other=float("-inf")).to(tl.float32)
    t = tl.load(temperatures + row)
    weight = weigh(x, tl.load(tops + row), tl.where(t > 0, t, 1.0))
    keep = _kept(x, token, cut_keys, cut_tokens, row, CUTS)
    if MIN_P:
        keep = keep & (weight >= tl.load(min_ps + row))
    total = tl.sum(tl.where(keep, weight, 0.0).to(tl.float64), axis=0)
    tl.store(sums + row * tl.num_programs(1) + piece, total)


@triton.jit
def range_after(
    counts: tl.tensor,
    weights: tl.tensor,
    state: tl.tensor,
    wanted: tl.tensor,
    row: tl.tensor,
    before: tl.tensor,
    BY_WEIGHT: tl.constexpr,
    C: tl.constexpr,
    ROOM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Chooses the range of keys that contains the last token to keep, from the 16 ranges that a pass counted.

    Args:
        counts, weights: [R, C, 16], the number and the weight of the tokens in each range, by piece of the vocabulary.
        state: see the module; ``before`` is the index of its three numbers before the pass.
        wanted: the number of tokens to keep, or with BY_WEIGHT their weight.
        row: the row.
        ROOM: a power of 2, at least C.

    Returns:
        the first bits of the keys in the range, the number and the weight of the tokens above it, and the number of
            tokens
        in it.
    """
    piece = tl.arange(0, ROOM)
    which = tl.arange(0, 16)
    at = (row * C + piece)[:, None] * 16 + which[None, :]
    count = tl.sum(tl.load(counts + at, mask=(piece < C)[:, None], other=0), axis=0).to(tl.float64)  # [16]
    weight = tl.sum(tl.load(weights + at, mask=(piece < C)[:, None], other=0.0), axis=0)  # [16]
    prefix = tl.load(state + before)
    above_count = tl.load(state + before + 1)
    above_weight = tl.load(state + before + 2)
    # [16, 16]: of each range, the sum of those from it on.
    from_it = which[None, :] >= which[:, None]
    counted = tl.sum(tl.where(from_it, count[None, :], 0.0), axis=1) + above_count
    weighed = tl.sum(tl.where(from_it, weight[None, :], 0.0), axis=1) + above_weight
    reached = (weighed >= wanted) if BY_WEIGHT else (counted >= wanted)
    lowest = tl.min(tl.where(count > 0, which, 15), axis=0)  # where rounding leaves the sums below what is wanted
    chosen = tl.maximum(tl.max(tl.where(reached & (count > 0), which, -1), axis=0), lowest)
    over = which > chosen
    above_count += tl.sum(tl.where(over, count, 0.0), axis=0)
    above_weight += tl.sum(tl.where(over, weight, 0.0), axis=0)
    inside = tl.sum(tl.where(which == chosen, count, 0.0), axis=0)
    return prefix * 16.0 + chosen, above_count, above_weight, inside


@triton.jit
def _wanted(
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    sums: tl.tensor,
    row: tl.tensor,
    BY_WEIGHT: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    ROOM: tl.constexpr,
) -> tl.tensor:
    """Returns the number of tokens that top_k keeps in a row, or the weight that top_p keeps, as float64."""
    if BY_WEIGHT:
        piece = tl.arange(0, ROOM)
        total = tl.sum(tl.load(sums + row * C + piece, mask=piece < C, other=0.0), axis=0)
        return total * tl.load(top_ps + row).to(tl.float64)
    k = tl.load(top_ks + row)
    return tl.where((k > 0) & (k < V), k, V).to(tl.float64)


@triton.jit(do_not_specialize=["number"])
def narrow_kernel(
    logits: tl.tensor,
    tops: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    sums: tl.tensor,
    cut_keys: tl.tensor,
    cut_tokens: tl.tensor,
    counts: tl.tensor,
    weights: tl.tensor,
    state: tl.tensor,
    number: tl.tensor,
    STRIDE: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    ROOM: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
    CUTS: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Counts the tokens, and sums their weights, in the 16 ranges of the key's next four bits; grid (R, C).

    It first chooses the range of the pass before, and counts only tokens in it that the first CUTS cuts keep.

    ``counts`` and ``weights`` are [2, R, C, 16]: a pass reads one half and writes the other. ``number`` is the pass, 0
    to
    7.
    """
    row = tl.program_id(0)
    piece = tl.program_id(1)
    half = number % 2
    size = tl.num_programs(0) * C * 16
    prefix = row.to(tl.float64) * 0.0
    count = prefix
    weight = prefix
    if number > 0:
        quota = _wanted(top_ks, top_ps, sums, row, BY_WEIGHT, V, C, ROOM)
        before = (row * 9 + number - 1) * 3
        read = (1 - half) * size
        prefix, count, weight, _ = range_after(
            counts + read, weights + read, state, quota, row, before, BY_WEIGHT, C, ROOM
        )
    if piece == 0:
        at = (row * 9 + number) * 3
        tl.store(state + at, prefix)
        tl.store(state + at + 1, count)
        tl.store(state + at + 2, weight)
    token = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row.to(tl.int64) * STRIDE + token, mask=token < V, other=float("-inf")).to(tl.float32)
    t = tl.load(temperatures + row)
    mass = weigh(x, tl.load(tops + row), tl.where(t > 0, t, 1.0)).to(tl.float64)
    key = key_of(x)
    shift = (28 - 4 * number).to(tl.int64)
    within = _kept(x, token, cut_keys, cut_tokens, row, CUTS) & (token < V)
    within = within & ((key >> (shift + 4)) == prefix.to(tl.int64))
    which = (key >> shift) & 15
    hit = within[:, None] & (which[:, None] == tl.arange(0, 16)[None, :])  # [PIECE, 16]
    to = half * size + (row * C + piece) * 16 + tl.arange(0, 16)
    tl.store(counts + to, tl.sum(hit.to(tl.int32), axis=0))
    tl.store(weights + to, tl.sum(tl.where(hit, mass[:, None], 0.0), axis=0))


@triton.jit
def cut_kernel(
    logits: tl.tensor,
    tops: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    weights: tl.tensor,
    state: tl.tensor,
    cut_keys: tl.tensor,
    cut_tokens: tl.tensor,
    STRIDE: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    ROOM: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Computes a cut after the last pass: the key of the last token that is kept, and its id; grid (R).

    It writes cut 0 (top_k), or with BY_WEIGHT cut 1 (top_p, of the tokens that cut 0 keeps). Among tokens with the same
    key, those with the lowest ids are kept.
    """
    row = tl.program_id(0)
    quota = _wanted(top_ks, top_ps, sums, row, BY_WEIGHT, V, C, ROOM)
    before = (row * 9 + 7) * 3
    size = tl.num_programs(0) * C * 16
    prefix, count, weight, ties = range_after(
        counts + size, weights + size, state, quota, row, before, BY_WEIGHT, C, ROOM
    )
    border = prefix.to(tl.int64)
    if BY_WEIGHT:
        bits = tl.where(border >= 2147483648, border - 2147483648, -1 - border).to(tl.int32)
        t = tl.load(temperatures + row)
        mass = weigh(bits.to(tl.float32, bitcast=True), tl.load(tops + row), tl.where(t > 0, t, 1.0)).to(tl.float64)
        needed = tl.ceil((quota - weight) / tl.where(mass > 0, mass, 1.0))
        every = tl.load(top_ps + row) >= 1.0
    else:
        needed = quota - count
        k = tl.load(top_ks + row)
        every = (k <= 0) | (k >= V)
    left = tl.maximum(needed, 1.0).to(tl.int32)
    last = row * 0 + V
    if (ties > left.to(tl.float64)) & (every == 0):
        ties_before = 0
        for start in range(0, V, PIECE):
            token = start + tl.arange(0, PIECE)
            x = tl.load(logits + row.to(tl.int64) * STRIDE + token, mask=token < V, other=float("-inf")).to(tl.float32)
            tied = ((key_of(x) == border) & (token < V)).to(tl.int32)
            rank = ties_before + tl.cumsum(tied, axis=0)
            last = tl.minimum(last, tl.min(tl.where((tied > 0) & (rank == left), token, V), axis=0))
            ties_before += tl.sum(tied, axis=0)
    cut = tl.num_programs(0) if BY_WEIGHT else 0
    tl.store(cut_keys + cut + row, tl.where(every, border * 0, border))
    tl.store(cut_tokens + cut + row, tl.where(every, V, last))


@triton.jit
def draw_kernel(
    logits: tl.tensor,
    tops: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    cut_keys: tl.tensor,
    cut_tokens: tl.tensor,
    sums: tl.tensor,
    seeds: tl.tensor,
    counters: tl.tensor,
    tokens: tl.tensor,
    STRIDE: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    ROOM: tl.constexpr,
    CUTS: tl.constexpr,
    MIN_P: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Draws a token for each row with its random number, in proportion to the weights -> ``tokens``; grid (R).

    Rows with temperature 0, and rows that can't be drawn from, keep the token of ``choose_largest_kernel``. ``seeds``
    and ``counters``, int64, are key and counter of Philox4x32-10 (Salmon et al., 2011).
    """
    row = tl.program_id(0)
    t = tl.load(temperatures + row)
    if (t > 0) & (tl.load(tokens + row) >= 0):
        counter = tl.load(counters + row)
        zero = (counter * 0).to(tl.uint32)
        first, second, _, _ = tl.philox(
            tl.load(seeds + row), counter.to(tl.uint32), (counter >> 32).to(tl.uint32), zero, zero
        )
        bits = ((first.to(tl.uint64) << 32) | second.to(tl.uint64)) >> 11
        uniform = bits.to(tl.float64) * 1.1102230246251565e-16
        piece = tl.arange(0, ROOM)
        parts = tl.load(sums + row * C + piece, mask=piece < C, other=0.0)
        total = tl.sum(parts, axis=0)
        target = uniform * total
        running = tl.cumsum(parts, axis=0)
        holding = tl.max(tl.where(parts > 0, piece, 0), axis=0)  # the last piece with any weight
        chosen = tl.minimum(tl.sum((running <= target).to(tl.int32), axis=0), holding)
        below = tl.sum(tl.where(piece < chosen, parts, 0.0), axis=0)
        token = chosen * PIECE + tl.arange(0, PIECE)
        x = tl.load(logits + row.to(tl.int64) * STRIDE + token, mask=token < V, other=float("-inf")).to(tl.float32)
        weight = weigh(x, tl.load(tops + row), t)
        keep = _kept(x, token, cut_keys, cut_tokens, row, CUTS)
        if MIN_P:
            keep = keep & (weight >= tl.load(min_ps + row))
        mass = tl.where(keep, weight, 0.0).to(tl.float64)
        reached = below + tl.cumsum(mass, axis=0)
        hit = tl.min(tl.where((reached > target) & (mass > 0), token, V), axis=0)
        last = tl.max(tl.where(mass > 0, token, 0), axis=0)  # rounding may leave the target above the last sum
        tl.store(tokens + row, tl.where(hit < V, hit, last))
