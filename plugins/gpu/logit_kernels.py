"""Triton kernels that change logits before sampling: penalties, biases and bans, in the order of the cpu sampler.

All lists of tokens are in one array ``lists``. Row r's tokens are at start[r] to start[r + 1], where start is [R + 1].
With n = start[R] - start[0], the value that belongs to a token (such as its bias) is n elements after it. Tokens
outside the vocabulary are ignored.

Shape letters: R rows, V tokens, C pieces of PIECE tokens.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _finite(logits: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(logits, -3.4028234663852886e38), 3.4028234663852886e38)


@triton.jit
def _penalized(logits: tl.tensor, penalty: tl.tensor) -> tl.tensor:
    """Returns the logits after a repetition penalty; -infinity stays."""
    y = _finite(tl.where(logits < 0, logits * penalty, logits / penalty))
    return tl.where((tl.abs(logits) == float("inf")) | (logits != logits), logits, y)


@triton.jit
def penalize_kernel(
    logits: tl.tensor,
    seen: tl.tensor,
    seen_start: tl.tensor,
    penalties: tl.tensor,
    out: tl.tensor,
    STRIDE: tl.constexpr,
    V: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Writes the penalized logits of tokens that occurred to ``out`` float32 [R, V], which already has all logits; grid
    (R).

    ``seen`` has the tokens of row r at seen_start[r] to seen_start[r + 1]. A token that occurs twice is written twice
    with the same value.
    """
    row = tl.program_id(0)
    penalty = tl.load(penalties + row)
    begin = tl.load(seen_start + row)
    end = tl.load(seen_start + row + 1)
    for start in range(begin, end, PIECE):
        place = start + tl.arange(0, PIECE)
        token = tl.load(seen + place, mask=place < end, other=-1)
        there = (token >= 0) & (token < V)
        x = tl.load(logits + row.to(tl.int64) * STRIDE + token, mask=there, other=0.0).to(tl.float32)
        tl.store(out + row.to(tl.int64) * V + token, _penalized(x, penalty), mask=there)


@triton.jit
def widen_kernel(logits: tl.tensor, out: tl.tensor, STRIDE: tl.constexpr, V: tl.constexpr, PIECE: tl.constexpr) -> None:
    """Converts logits [R, V] to out float32 [R, V]; grid (R, C)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row * STRIDE + token, mask=token < V, other=0.0).to(tl.float32)
    tl.store(out + row * V + token, x, mask=token < V)


@triton.jit
def edit_kernel(
    logits: tl.tensor,
    tokens: tl.tensor,
    lists: tl.tensor,
    allowed_start: tl.tensor,
    biased_start: tl.tensor,
    seen_start: tl.tensor,
    counted_start: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    out: tl.tensor,
    STRIDE: tl.constexpr,
    V: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Applies all lists to the rows of ``out`` float32 [R, V], which already has the logits; grid (R).

    In this order: if a row has a list of allowed tokens, all others become -infinity; biases are added; the repetition
    penalty is applied; the penalties by count are applied. The value of a biased token is its bias as bits of a
    float32, that of a counted token its count. The values of seen tokens are scratch memory for their logits, because a
    token that occurs twice is penalized once. In the other lists a token occurs once. Rows whose ``tokens`` is negative
    are skipped.
    """
    row = tl.program_id(0)
    rows = tl.num_programs(0)
    of = row.to(tl.int64) * V
    if tl.load(tokens + row) >= 0:
        begin = tl.load(allowed_start + row)
        end = tl.load(allowed_start + row + 1)
        if begin < end:
            for start in range(0, V, PIECE):
                token = start + tl.arange(0, PIECE)
                tl.store(out + of + token, tl.full([PIECE], float("-inf"), tl.float32), mask=token < V)
            tl.debug_barrier()  # what one thread wrote, another reads
            for start in range(begin, end, PIECE):
                place = start + tl.arange(0, PIECE)
                token = tl.load(lists + place, mask=place < end, other=-1)
                there = (token >= 0) & (token < V)
                x = tl.load(logits + row.to(tl.int64) * STRIDE + token, mask=there, other=0.0).to(tl.float32)
                tl.store(out + of + token, x, mask=there)
            tl.debug_barrier()
        begin = tl.load(biased_start + row)
        end = tl.load(biased_start + row + 1)
        behind = tl.load(biased_start + rows) - tl.load(biased_start)
        for start in range(begin, end, PIECE):
            place = start + tl.arange(0, PIECE)
            token = tl.load(lists + place, mask=place < end, other=-1)
            there = (token >= 0) & (token < V)
            bias = tl.load(lists + behind + place, mask=place < end, other=0).to(tl.float32, bitcast=True)
            x = tl.load(out + of + token, mask=there, other=0.0)
            banned = (x == float("-inf")) | (bias == float("-inf"))
            tl.store(out + of + token, tl.where(banned, float("-inf"), _finite(x + bias)), mask=there)
        tl.debug_barrier()
        begin = tl.load(seen_start + row)
        end = tl.load(seen_start + row + 1)
        behind = tl.load(seen_start + rows) - tl.load(seen_start)
        for start in range(begin, end, PIECE):
            place = start + tl.arange(0, PIECE)
            token = tl.load(lists + place, mask=place < end, other=-1)
            x = tl.load(out + of + token, mask=(token >= 0) & (token < V), other=0.0)
            tl.store(lists + behind + place, x.to(tl.int32, bitcast=True), mask=place < end)
        tl.debug_barrier()
        penalty = tl.load(repetition + row)
        for start in range(begin, end, PIECE):
            place = start + tl.arange(0, PIECE)
            token = tl.load(lists + place, mask=place < end, other=-1)
            x = tl.load(lists + behind + place, mask=place < end, other=0).to(tl.float32, bitcast=True)
            tl.store(out + of + token, _penalized(x, penalty), mask=(token >= 0) & (token < V))
        tl.debug_barrier()
        begin = tl.load(counted_start + row)
        end = tl.load(counted_start + row + 1)
        behind = tl.load(counted_start + rows) - tl.load(counted_start)
        for start in range(begin, end, PIECE):
            place = start + tl.arange(0, PIECE)
            token = tl.load(lists + place, mask=place < end, other=-1)
            there = (token >= 0) & (token < V)
            count = tl.load(lists + behind + place, mask=place < end, other=0).to(tl.float32)
            x = tl.load(out + of + token, mask=there, other=0.0)
            y = _finite(_finite(x - tl.load(frequency + row) * count) - tl.load(presence + row))
            tl.store(out + of + token, tl.where(x == float("-inf"), x, y), mask=there)


@triton.jit
def mask_kernel(
    tokens: tl.tensor, mask_rows: tl.tensor, bits: tl.tensor, out: tl.tensor, V: tl.constexpr, PIECE: tl.constexpr
) -> None:
    """Sets the logits of tokens that a row's mask doesn't allow to -infinity in ``out`` float32 [R, V]; grid (R, C).

    ``bits`` is int32 [masks, ceil(V / 32)]: bit i % 32 of word i / 32 is for token i. ``mask_rows`` [R] has the index
    of each row's mask, -1 for none. Rows whose ``tokens`` is negative are skipped.
    """
    row = tl.program_id(0)
    mask = tl.load(mask_rows + row)
    if (mask >= 0) & (tl.load(tokens + row) >= 0):
        token = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
        words = bits + mask.to(tl.int64) * ((V + 31) // 32)
        word = tl.load(words + token // 32, mask=token < V, other=-1)
        banned = ((word >> (token % 32)) & 1) == 0
        tl.store(
            out + row.to(tl.int64) * V + token, tl.full([PIECE], float("-inf"), tl.float32), mask=banned & (token < V)
        )
