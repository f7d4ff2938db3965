"""Triton kernels of ``ew.paged_attention``: one for prefill and decode, and one that combines a long context's parts.

A program attends with a *tile*: up to QUERIES neighbouring tokens of one request, with all GROUP heads that share one
key/value head, so that a key is loaded once for all of them. Keys are visited in tiles of KEYS at absolute positions by
online softmax (Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867), in base 2. For decoding, keys are split
at multiples of SPLIT_KEYS, also absolute, so that a result doesn't depend on who else is in the batch
(Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

Arguments stand in the order in which TensorRT hands them over: inputs, integers, outputs. Sinks and slopes that a model
lacks may be any pointer, or None; so may the scales of a float cache, and ``lse`` where nothing is split.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cache_kernels import e4m3_to_float


@triton.jit
def _request_of_tile(q_start: tl.tensor, tile: tl.tensor, requests: tl.tensor, QUERIES: tl.constexpr) -> tl.tensor:
    """The last request b whose tiles begin at or before ``tile``; they begin at q_start[b] // QUERIES + b.

    So every request has tiles enough, and how many there are, T // QUERIES + B, is known without looking at q_start.
    """
    low = tile * 0
    high = low + requests
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(q_start + middle) // QUERIES + middle
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle)
    return low


@triton.jit
def _codes_to_float(codes: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """What a cache holds, as float32; without its scale."""
    return e4m3_to_float(codes) if FORMAT == "e4m3" else codes.to(tl.float32)


@triton.jit(do_not_specialize=["requests", "blocks"])  # else each batch of another kind is compiled anew
def paged_attention_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    block_table: tl.tensor,
    q_start: tl.tensor,
    kv_len: tl.tensor,
    sinks: tl.tensor,
    slopes: tl.tensor,
    requests: tl.tensor,
    blocks: tl.tensor,
    q_stride: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    FORMAT: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
) -> None:
    """q [T, Nq, D] over caches [P, K, Nkv, D] and [P, K, Nkv, Dv]; grid (T // QUERIES + B, Nkv, splits).

    ``q_stride`` is between tokens of q, ``blocks`` between requests of the table. SPLIT_KEYS = 0: the result goes to
    ``out`` [T, Nq, Dv]. Else each split's part, a result of its own, goes to ``out`` float32 [T, Nq, splits, Dv], and
    the logarithm (base 2) of its softmax's denominator to ``lse`` float32 [T, Nq, splits]: -inf where the split has no
    key (there ``out`` isn't written). ``FORMAT`` is "float", "int8", "fp8" (a pointer of that type) or "e4m3" (bytes).
    """
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)

    request = _request_of_tile(q_start, tile, requests, QUERIES)
    first_token = tl.load(q_start + request)
    tokens = tl.load(q_start + request + 1) - first_token  # of the request in this step
    first = (tile - (first_token // QUERIES + request)) * QUERIES  # the tile's first, within them
    if first >= tokens:
        return
    before = tl.load(kv_len + request) - tokens  # the position of the request's first token in this step

    row = tl.arange(0, ROWS)
    query = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = (row // GROUP < QUERIES) & (query < tokens)  # [ROWS]
    position = before + query
    token = (first_token + query).to(tl.int64)
    place = token * Q_HEADS + head  # [ROWS], in [T, Nq]

    lowest = tl.maximum(before + first - WINDOW + 1, 0) if WINDOW else 0  # first key that the tile sees
    low = lowest
    high = before + tl.minimum(first + QUERIES, tokens)
    sink_split = 0  # the first with a key
    if SPLIT_KEYS:
        sink_split = lowest // SPLIT_KEYS
        low = tl.maximum(lowest, split * SPLIT_KEYS)
        high = tl.minimum(high, (split + 1) * SPLIT_KEYS)
        if low >= high:
            tl.store(lse + place * splits + split, tl.full([ROWS], float("-inf"), tl.float32), mask=valid)
            return

    d = tl.arange(0, WIDTH)
    e = tl.arange(0, VALUE_WIDTH)
    queries = tl.load(
        q + token[:, None] * q_stride + (head * HEAD_SIZE)[:, None] + d[None, :],
        mask=valid[:, None] & (d < HEAD_SIZE)[None, :],
        other=0.0,
    )  # [ROWS, WIDTH]
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    if SINKS:
        sunk = valid & (row * 0 + split == sink_split)
        largest = tl.load(sinks + head, mask=sunk, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        total += tl.where(sunk, 1.0, 0.0)
    if SLOPES:
        slope = tl.load(slopes + head, mask=valid, other=0.0).to(tl.float32)

    for start in range(low // KEYS * KEYS, high, KEYS):
        key = start + tl.arange(0, KEYS)
        present = (key >= low) & (key < high)
        block = tl.load(block_table + request * blocks + key // BLOCK_SIZE, mask=present, other=0)
        cached = (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * KV_HEADS + kv_head  # [KEYS], in [P*K, Nkv]
        keys = tl.load(
            k_cache + cached[None, :] * HEAD_SIZE + d[:, None],
            mask=present[None, :] & (d < HEAD_SIZE)[:, None],
            other=0.0,
        )  # [WIDTH, KEYS]
        if FORMAT != "float":
            keys = _codes_to_float(keys, FORMAT)  # exact in float16 and bfloat16 too
        scores = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * SCALE  # [ROWS, KEYS]
        if FORMAT != "float":
            scores *= tl.load(k_scales + cached, mask=present, other=0.0)[None, :]
        if SOFTCAP != 0.0:
            fall = tl.exp2(tl.abs(scores) * (-2.0 * 1.4426950408889634 / SOFTCAP))
            bent = (1.0 - fall) / (1.0 + fall) * SOFTCAP  # tanh
            scores = tl.where(scores < 0, -bent, bent)
        if SLOPES:
            scores += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        visible = present[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            visible &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(visible, scores * 1.4426950408889634, float("-inf"))

        larger = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # no key seen yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, axis=1)
        cached_values = tl.load(
            v_cache + cached[:, None] * VALUE_SIZE + e[None, :],
            mask=present[:, None] & (e < VALUE_SIZE)[None, :],
            other=0.0,
        )  # [KEYS, VALUE_WIDTH]
        if FORMAT != "float":
            value_scales = tl.load(v_scales + cached, mask=present, other=0.0)
            cached_values = _codes_to_float(cached_values, FORMAT) * value_scales[:, None]
        values = tl.dot(
            weights.to(queries.dtype),
            cached_values.to(queries.dtype),
            values * shrink[:, None],
            input_precision="ieee",
        )
        largest = larger

    seen = tl.where(total == 0.0, 1.0, total)  # rows of no query
    values = values / seen[:, None]
    inside = valid[:, None] & (e < VALUE_SIZE)[None, :]
    if SPLIT_KEYS:
        to = place * splits + split
        tl.store(out + to[:, None] * VALUE_SIZE + e[None, :], values, mask=inside)
        tl.store(lse + to, tl.where(total == 0.0, float("-inf"), largest + tl.log2(seen)), mask=valid)
    else:
        tl.store(out + place[:, None] * VALUE_SIZE + e[None, :], values.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits"])
def combine_splits_kernel(
    parts: tl.tensor,
    lse: tl.tensor,
    splits: tl.tensor,
    out: tl.tensor,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """parts float32 [T, Nq, splits, Dv], lse float32 [T, Nq, splits] -> out [T, Nq, Dv]; grid (T * Nq).

    AT_ONCE splits are loaded together.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, VALUE_WIDTH)
    index = tl.arange(0, AT_ONCE)
    largest = tl.full([AT_ONCE], float("-inf"), tl.float32)
    for start in range(0, splits, AT_ONCE):
        there = start + index < splits
        largest = tl.maximum(largest, tl.load(lse + row * splits + start + index, mask=there, other=float("-inf")))
    top = tl.max(largest, axis=0)
    total = tl.zeros([AT_ONCE], tl.float32)
    values = tl.zeros([AT_ONCE, VALUE_WIDTH], tl.float32)
    for start in range(0, splits, AT_ONCE):
        there = start + index < splits
        place = row * splits + start + index
        share = tl.exp2(tl.load(lse + place, mask=there, other=float("-inf")) - top)  # 0 where nothing was written
        part = tl.load(
            parts + place[:, None] * VALUE_SIZE + e[None, :],
            mask=(share > 0)[:, None] & (e < VALUE_SIZE)[None, :],
            other=0.0,
        )
        total += share
        values += part * share[:, None]
    result = tl.sum(values, axis=0) / tl.sum(total, axis=0)
    tl.store(out + row * VALUE_SIZE + e, result.to(out.dtype.element_ty), mask=e < VALUE_SIZE)
