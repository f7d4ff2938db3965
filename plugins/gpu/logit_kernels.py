"""Triton kernels that change logits before tokens are drawn: penalties, biases, bans, in the cpu sampler's order.

Lists of tokens are in one array ``lists``. Row r's are at start[r] .. start[r + 1], where start is [R + 1]; with n =
start[R] - start[0], what goes with a token lies n behind it. Tokens that aren't in the vocabulary are left out.

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
    """Penalizes logits; those that can't be drawn stay so."""
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
    """The logits of seen tokens, penalized -> ``out`` float32 [R, V], which has the logits; grid (R).

    ``seen``: tokens of row r at seen_start[r] .. seen_start[r + 1]; one that comes twice is written twice, the same.
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
    """logits [R, V] -> out float32 [R, V]; grid (R, C)."""
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
    """All that lists say of a row's logits -> ``out`` float32 [R, V], which has the logits; grid (R).

    One after the other: tokens that aren't allowed get -infinity, where a row has a list of those that are; biases are
    added; the repetition penalty, then those by counts. What goes with a biased token is its bias as float32's bits,
    with a counted one how often it came; behind the seen ones is room for their logits, since one that comes twice is
    penalized once. A token comes once in the other lists. Rows whose ``tokens`` is negative are left as they are.
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
