"""Triton kernels of ``ew.paged_attention``, for prompts and for decoding, with contexts split into parts.

A program computes the attention of a *tile*: up to QUERIES neighbouring tokens of one request, with all GROUP heads
that share a key/value head, so that each key is loaded once for all of them. SHARES programs divide these heads where a
tile holds no more. For decoding, keys are split at multiples
of SPLIT_KEYS (absolute positions), so that a result doesn't depend on the batch (Flash-Decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html). A second kernel combines the parts.

The grid is made for the longest context that a table has room for; most programs then have nothing to do. If a step may
launch several kernels, ``decode_work_kernel`` lists the parts first, and the programs go through the list.

Arguments are in TensorRT's order: inputs, integers, outputs. Any pointer or None may be passed for sinks and slopes
that a model lacks, for the scales of a float cache, and for ``lse`` if nothing is split. The attention kernels' other
constants are fields of one constant, C (``AttentionConstants``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tile import LOG2E, attend_tile, merged


@triton.jit
def request_of_tile(q_start: tl.tensor, tile: tl.tensor, requests: tl.tensor, QUERIES: tl.constexpr) -> tl.tensor:
    """Returns the last request b whose tiles begin at or before ``tile``; they begin at q_start[b] // QUERIES + b.

    So every request has enough tiles, and their total number T // QUERIES + B doesn't depend on q_start.
    """
    low = tile * 0
    high = low + requests
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(q_start + middle) // QUERIES + middle
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle)
    return low


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
    pool: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    C: tl.constexpr,
    SKIP_SINGLES: tl.constexpr = False,
    CLAMP: tl.constexpr = False,
    EXACT: tl.constexpr = 0,
    k_cache_ends: tl.tensor = None,
    v_cache_ends: tl.tensor = None,
    k_scales_ends: tl.tensor = None,
    v_scales_ends: tl.tensor = None,
    ends_table: tl.tensor = None,
) -> None:
    """Computes attention of q [T, Nq, D] over caches [P, K, Nkv, D] and [P, K, Nkv, Dv]; grid (T // QUERIES + B,
    Nkv * SHARES, splits).

    ``q_stride`` is the distance of q's tokens, ``blocks`` the distance of the table's requests, in elements.

    If SPLIT_KEYS is 0, the result is written to ``out`` [T, Nq, Dv]. Otherwise each split writes its own result to
    ``out`` float32 [T, Nq, splits, Dv], and the logarithm (base 2) of its softmax's denominator to ``lse`` float32
    [T, Nq, splits]. A split without keys writes only -inf to ``lse``.

    ``FORMAT`` of the cache is "float", "int8", "fp8" (a pointer of that type), "e4m3" (bytes), "rotated8" or "rotated4"
    (bytes). With AHEAD, blocks are looked up one step before their keys. With SKIP_SINGLES, requests with one token are
    skipped. With ENDS, the last five arguments are a second cache and its table, laid out as the first's: see
    attention_tile.py.

    With CLAMP, the kernel ends soon and reads only its arguments' memory whatever q_start, kv_len and the table
    contain: q has ``total`` tokens, the caches have ``pool`` blocks. TensorRT needs that, as it times plugins on
    invented inputs. Without CLAMP, both may be None. EXACT is that of ``attend_tile``.
    """
    GROUP: tl.constexpr = C.Q_HEADS // (C.KV_HEADS * C.SHARES)
    tile = tl.program_id(0)
    share = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)

    request = request_of_tile(q_start, tile, requests, C.QUERIES)
    first_token = tl.load(q_start + request)
    behind = tl.load(q_start + request + 1)
    if CLAMP:
        first_token = tl.minimum(tl.maximum(first_token, 0), total)
        behind = tl.minimum(tl.maximum(behind, first_token), total)
    tokens = behind - first_token  # of the request in this step
    first = (tile - (first_token // C.QUERIES + request)) * C.QUERIES  # the tile's first, within them
    if CLAMP:
        first = tl.where(first < 0, tokens, first)
    if SKIP_SINGLES:
        first = tl.where(tokens == 1, 1, first)
    if first >= tokens:
        return
    length = tl.load(kv_len + request)
    if CLAMP:
        length = tl.minimum(tl.maximum(length, tokens), tl.maximum(blocks * C.BLOCK_SIZE, tokens))
    before = length - tokens  # the position of the request's first token in this step

    lowest = tl.maximum(before + first - C.WINDOW + 1, 0) if C.WINDOW else 0  # first key that the tile sees
    low = lowest
    high = before + tl.minimum(first + C.QUERIES, tokens)
    if CLAMP:
        high = tl.minimum(high, blocks * C.BLOCK_SIZE)
    sink_split = 0  # the first with a key
    if C.SPLIT_KEYS:
        sink_split = lowest // C.SPLIT_KEYS
        low = tl.maximum(lowest, split * C.SPLIT_KEYS)
        high = tl.minimum(high, (split + 1) * C.SPLIT_KEYS)
        if low >= high:
            row = tl.arange(0, C.ROWS)
            query = first + row // GROUP
            place = (first_token + query).to(tl.int64) * C.Q_HEADS + share * GROUP + row % GROUP
            valid = (row // GROUP < C.QUERIES) & (query < tokens)
            tl.store(lse + place * splits + split, tl.full([C.ROWS], float("-inf"), tl.float32), mask=valid)
            return
    attend_tile(
        q, k_cache, v_cache, k_scales, v_scales, block_table + request * blocks,
        k_cache_ends, v_cache_ends, k_scales_ends, v_scales_ends,
        ends_table + request * blocks if C.ENDS else ends_table, pool, sinks, slopes, q_stride,
        out, lse, first_token, first_token, tokens, first, before, low, high, share, split, splits, sink_split,
        C, CLAMP, EXACT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["blocks", "splits"])
def listed_attention_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    block_table: tl.tensor,
    kv_len: tl.tensor,
    work: tl.tensor,
    sinks: tl.tensor,
    slopes: tl.tensor,
    blocks: tl.tensor,
    q_stride: tl.tensor,
    splits: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    C: tl.constexpr,
    q_start: tl.tensor = None,
    MIXED: tl.constexpr = False,
    EXACT: tl.constexpr = 0,
    k_cache_ends: tl.tensor = None,
    v_cache_ends: tl.tensor = None,
    k_scales_ends: tl.tensor = None,
    v_scales_ends: tl.tensor = None,
    ends_table: tl.tensor = None,
) -> None:
    """Computes the parts that ``decode_work_kernel`` listed in ``work``, as ``paged_attention_kernel`` does; grid (any,
    Nkv * SHARES).

    Token b belongs to request b; with MIXED, request b has the token ``q_start[b]``, and its results are in row b.
    ``splits`` is the number of parts per row in ``out`` and ``lse``; parts that aren't listed aren't written.
    """
    share = tl.program_id(1)
    count = tl.load(work)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        request = tl.load(work + 1 + 2 * item)
        split = tl.load(work + 2 + 2 * item)
        length = tl.load(kv_len + request)
        token = request
        if MIXED:
            token = tl.load(q_start + request)
        lowest = tl.maximum(length - C.WINDOW, 0) if C.WINDOW else 0
        low = tl.maximum(lowest, split * C.SPLIT_KEYS)
        high = tl.minimum(length, (split + 1) * C.SPLIT_KEYS)
        attend_tile(
            q, k_cache, v_cache, k_scales, v_scales, block_table + request * blocks,
            k_cache_ends, v_cache_ends, k_scales_ends, v_scales_ends,
            ends_table + request * blocks if C.ENDS else ends_table, blocks, sinks, slopes, q_stride,
            out, lse, token, request, 1, 0, length - 1, low, high, share, split, splits, lowest // C.SPLIT_KEYS,
            C, False, EXACT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["requests"])
def decode_work_kernel(
    kv_len: tl.tensor,
    requests: tl.tensor,
    work: tl.tensor,
    WINDOW: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    REQUESTS: tl.constexpr,
    q_start: tl.tensor = None,
    MIXED: tl.constexpr = False,
) -> None:
    """Lists the parts of a decode step: kv_len [B] -> work int32 [1 + 2 parts]: the number of parts, then (request,
    split) each.

    A part is SPLIT_KEYS keys of a request; with WINDOW, only parts with one of the last WINDOW keys are listed. A
    request with kv_len 0 has no parts; with MIXED, only requests with exactly one token by ``q_start`` [B + 1] have
    parts. Grid (B); REQUESTS is a power of 2, at least B.
    """
    request = tl.program_id(0)
    index = tl.arange(0, REQUESTS)
    length = tl.load(kv_len + index, mask=index < requests, other=0)
    if MIXED:
        first_token = tl.load(q_start + index, mask=index < requests, other=0)
        behind = tl.load(q_start + index + 1, mask=index < requests, other=0)
        length = tl.where(behind - first_token == 1, length, 0)
    begins = tl.maximum(length - WINDOW, 0) // SPLIT_KEYS if WINDOW else length * 0
    parts = (length + SPLIT_KEYS - 1) // SPLIT_KEYS - begins
    at = tl.sum(tl.where(index < request, parts, 0), axis=0)
    first = tl.sum(tl.where(index == request, begins, 0), axis=0)
    count = tl.sum(tl.where(index == request, parts, 0), axis=0)
    for part in range(0, count):
        tl.store(work + 1 + 2 * (at + part), request)
        tl.store(work + 2 + 2 * (at + part), first + part)
    if request == 0:
        tl.store(work, tl.sum(parts, axis=0))


@triton.jit(do_not_specialize=["splits"])
def combine_splits_kernel(
    parts: tl.tensor,
    lse: tl.tensor,
    splits: tl.tensor,
    out: tl.tensor,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
    kv_len: tl.tensor = None,
    Q_HEADS: tl.constexpr = 1,
    WINDOW: tl.constexpr = 0,
    SPLIT_KEYS: tl.constexpr = 0,
    q_start: tl.tensor = None,
    MIXED: tl.constexpr = False,
) -> None:
    """Combines parts float32 [T, Nq, splits, Dv] with lse float32 [T, Nq, splits] to out [T, Nq, Dv]; grid (T * Nq).

    AT_ONCE splits are loaded together. With SPLIT_KEYS, only the parts that ``decode_work_kernel`` lists for ``kv_len``
    are read; a row without parts becomes 0. With MIXED, rows are requests: the result of a request with one token is
    written to that token's row of ``out``, and other requests are skipped.
    """
    row = tl.program_id(0).to(tl.int64)
    to = row
    if MIXED:
        first_token = tl.load(q_start + row // Q_HEADS)
        if tl.load(q_start + row // Q_HEADS + 1) - first_token != 1:
            return
        to = first_token.to(tl.int64) * Q_HEADS + row % Q_HEADS
    e = tl.arange(0, VALUE_WIDTH)
    index = tl.arange(0, AT_ONCE)
    low = 0
    high = splits
    if SPLIT_KEYS:
        length = tl.load(kv_len + row // Q_HEADS)
        high = (length + SPLIT_KEYS - 1) // SPLIT_KEYS
        if WINDOW:
            low = tl.maximum(length - WINDOW, 0) // SPLIT_KEYS
    begin = low // AT_ONCE * AT_ONCE
    largest = tl.full([AT_ONCE], float("-inf"), tl.float32)
    for start in range(begin, high, AT_ONCE):
        there = (start + index >= low) & (start + index < high)
        largest = tl.maximum(largest, tl.load(lse + row * splits + start + index, mask=there, other=float("-inf")))
    top = tl.max(largest, axis=0)
    total = tl.zeros([AT_ONCE], tl.float32)
    values = tl.zeros([AT_ONCE, VALUE_WIDTH], tl.float32)
    for start in range(begin, high, AT_ONCE):
        there = (start + index >= low) & (start + index < high)
        place = row * splits + start + index
        share = tl.exp2(tl.load(lse + place, mask=there, other=float("-inf")) - top)  # 0 where nothing was written
        part = tl.load(
            parts + place[:, None] * VALUE_SIZE + e[None, :],
            mask=(share > 0)[:, None] & (e < VALUE_SIZE)[None, :],
            other=0.0,
        )
        total += share
        values += part * share[:, None]
    all_shares = tl.sum(total, axis=0)
    if SPLIT_KEYS:
        all_shares = tl.where(all_shares == 0.0, 1.0, all_shares)
    result = tl.sum(values, axis=0) / all_shares
    tl.store(out + to * VALUE_SIZE + e, result.to(out.dtype.element_ty), mask=e < VALUE_SIZE)


@triton.jit(do_not_specialize=["splits"])
def merge_parts_kernel(
    parts: tl.tensor,
    lse: tl.tensor,
    splits: tl.tensor,
    out: tl.tensor,
    kv_len: tl.tensor,
    sinks: tl.tensor,
    q_start: tl.tensor,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    Q_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SINKS: tl.constexpr,
    MIXED: tl.constexpr,
) -> None:
    """Merges parts float32 [B, Nq, splits, Dv] with lse float32 [B, Nq, splits, 2] in order to out [T, Nq, Dv]; grid
    (B * Nq).

    The parts are those that ``listed_attention_kernel`` wrote with EXACT, and the result has the bits that
    ``paged_attention_kernel`` has with EXACT. MIXED is as for ``combine_splits_kernel``.
    """
    row = tl.program_id(0).to(tl.int64)
    to = row
    if MIXED:
        first_token = tl.load(q_start + row // Q_HEADS)
        if tl.load(q_start + row // Q_HEADS + 1) - first_token != 1:
            return
        to = first_token.to(tl.int64) * Q_HEADS + row % Q_HEADS
    e = tl.arange(0, VALUE_WIDTH)
    one = tl.arange(0, 1)
    length = tl.load(kv_len + row // Q_HEADS)
    low = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    values = tl.zeros([1, VALUE_WIDTH], tl.float32)
    if SINKS:
        largest = tl.load(sinks + row % Q_HEADS + one).to(tl.float32) * LOG2E
        total += 1.0
    for part in range(low // SPLIT_KEYS, (length + SPLIT_KEYS - 1) // SPLIT_KEYS):
        at = row * splits + part
        part_values = tl.load(parts + at * VALUE_SIZE + e, mask=e < VALUE_SIZE, other=0.0)
        largest, total, values = merged(
            largest, total, values, tl.load(lse + 2 * at + one), tl.load(lse + 2 * at + 1 + one), part_values[None, :]
        )
    seen = tl.where(total == 0.0, 1.0, total)
    result = values / seen[:, None]
    place = out + to * VALUE_SIZE + e[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=(e < VALUE_SIZE)[None, :])
