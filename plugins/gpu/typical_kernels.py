"""Triton kernels for typical_p: they keep the tokens whose surprise is nearest to its mean (Meister et al., 2023).

The surprise of a token is log(sum) - u, where u = (logit - top) / temperature. Its distance from the mean surprise is
the distance of u from the mean of u. As for the other cuts, a key is searched four bits at a time. Here it is the
nearness, in 48 bits, the lowest of which is a distance of 2^-41. All kernels take contiguous float32 logits [R, V] and
set the logits of tokens that aren't kept to -infinity, so that kernels that draw need no further test.

Shape letters: R rows, V tokens, C pieces of PIECE tokens. ``state`` is [R, 13, 3] float64; see sampling_kernels.py.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_kernels import key_of, range_after, weigh

_NEAREST = tl.constexpr(281474976710655)  # 2^48 - 1
_STEPS = tl.constexpr(2199023255552.0)  # 2^41 in a distance of 1


@triton.jit
def _nearness(
    logits: tl.tensor, top: tl.tensor, temperature: tl.tensor, sums: tl.tensor, moments: tl.tensor
) -> tl.tensor:
    """Returns the nearness of a token's surprise to the mean, as int64 from 0 to 2^48 - 1.

    A token with any weight has a distance of less than 128 from the mean.
    """
    away = tl.abs(logits.to(tl.float64) - top.to(tl.float64) - moments / tl.where(sums > 0, sums, 1.0))
    steps = away * (_STEPS / temperature.to(tl.float64))
    return _NEAREST - tl.minimum(steps, 281474976710655.0).to(tl.int64)


@triton.jit
def spread_kernel(
    logits: tl.tensor,
    tops: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    cut_keys: tl.tensor,
    cut_tokens: tl.tensor,
    sums: tl.tensor,
    moments: tl.tensor,
    cuts: tl.tensor,
    V: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Applies the first ``cuts`` cuts of top_k and top_p, and min_p, to the logits; grid (R, C).

    Of the tokens that each piece keeps, it writes the sum of weights to sums float64 [R, C], and the sum of weight
    times (logit - top) to moments.
    """
    row = tl.program_id(0)
    piece = tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row.to(tl.int64) * V + token, mask=token < V, other=float("-inf"))
    t = tl.load(temperatures + row)
    top = tl.load(tops + row)
    weight = weigh(x, top, tl.where(t > 0, t, 1.0))
    key = key_of(x)
    keep = weight >= tl.load(min_ps + row)
    for cut in tl.static_range(2):
        border = tl.load(cut_keys + cut * tl.num_programs(0) + row)
        last = tl.load(cut_tokens + cut * tl.num_programs(0) + row)
        keep = keep & ((cut >= cuts) | (key > border) | ((key == border) & (token <= last)))
    tl.store(logits + row.to(tl.int64) * V + token, tl.where(keep, x, float("-inf")), mask=token < V)
    mass = tl.where(keep & (weight > 0), weight, 0.0).to(tl.float64)
    moment = tl.where(mass > 0, mass * (x.to(tl.float64) - top.to(tl.float64)), 0.0)
    tl.store(sums + row * tl.num_programs(1) + piece, tl.sum(mass, axis=0))
    tl.store(moments + row * tl.num_programs(1) + piece, tl.sum(moment, axis=0))


@triton.jit(do_not_specialize=["number"])
def nearest_kernel(
    logits: tl.tensor,
    tops: tl.tensor,
    temperatures: tl.tensor,
    typical_ps: tl.tensor,
    sums: tl.tensor,
    moments: tl.tensor,
    counts: tl.tensor,
    weights: tl.tensor,
    state: tl.tensor,
    number: tl.tensor,
    V: tl.constexpr,
    C: tl.constexpr,
    ROOM: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Counts the tokens, and sums their weights, in 16 ranges of the nearness's next four bits, as ``narrow_kernel``;
    grid (R, C).

    ``number`` is the pass, 0 to 11; pass 12 cuts the logits and keeps the tokens that are as near as the last one that
    is needed. Rows without a temperature, or with a typical_p of 1, aren't changed.
    """
    row = tl.program_id(0)
    piece = tl.program_id(1)
    half = number % 2
    size = tl.num_programs(0) * C * 16
    pieces = tl.arange(0, ROOM)
    total = tl.sum(tl.load(sums + row * C + pieces, mask=pieces < C, other=0.0), axis=0)
    moment = tl.sum(tl.load(moments + row * C + pieces, mask=pieces < C, other=0.0), axis=0)
    t = tl.load(temperatures + row)
    p = tl.where(t > 0, tl.load(typical_ps + row), 1.0)
    t = tl.where(t > 0, t, 1.0)
    prefix = total * 0.0
    count = prefix
    above = prefix
    if number > 0:
        read = (1 - half) * size
        before = (row * 13 + number - 1) * 3
        quota = total * p.to(tl.float64)
        prefix, count, above, _ = range_after(counts + read, weights + read, state, quota, row, before, True, C, ROOM)
    token = piece * PIECE + tl.arange(0, PIECE)
    at = logits + row.to(tl.int64) * V + token
    x = tl.load(at, mask=token < V, other=float("-inf"))
    top = tl.load(tops + row)
    weight = weigh(x, top, t)
    key = _nearness(x, top, t, total, moment)
    if number == 12:
        border = tl.where(p < 1.0, prefix, 0.0).to(tl.int64)
        tl.store(at, tl.where(key < border, float("-inf"), x), mask=token < V)
    else:
        if piece == 0:
            tl.store(state + (row * 13 + number) * 3, prefix)
            tl.store(state + (row * 13 + number) * 3 + 1, count)
            tl.store(state + (row * 13 + number) * 3 + 2, above)
        shift = (44 - 4 * number).to(tl.int64)
        within = (weight > 0) & ((key >> (shift + 4)) == prefix.to(tl.int64))
        which = (key >> shift) & 15
        hit = within[:, None] & (which[:, None] == tl.arange(0, 16)[None, :])  # [PIECE, 16]
        to = half * size + (row * C + piece) * 16 + tl.arange(0, 16)
        tl.store(counts + to, tl.sum(hit.to(tl.int32), axis=0))
        tl.store(weights + to, tl.sum(tl.where(hit, weight.to(tl.float64)[:, None], 0.0), axis=0))
