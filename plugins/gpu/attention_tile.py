"""Attention of one tile of queries over a range of keys, with an online softmax; part of the attention kernels.

Keys are processed KEYS at a time, from absolute positions that are multiples of KEYS, by online softmax (Milakov and
Gimelshein, 2018, https://arxiv.org/abs/1805.02867) in base 2. C has the kernel's constants (``AttentionConstants``).

With C.ENDS a second cache has the ends of requests (``KvFormat.ends``), in runs of END keys. Both are read in an order
that is the same for a query in any tile: the first run, the far runs of the first cache, the near runs::

    keys    | run 0: ends | 4 bits ..           | straddled: both     | near: ends .. |
                                                ^ near of the first query
                                                                      ^ near of the last query

A tile has at most END queries. If these are in two runs, the keys between are read from both caches, and each row sees
those of one.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import triton
import triton.language as tl

from enginewright.runtime.shared.kv_formats import END as _END

from .cache_kernels import e4m3_to_half, normal_integers, rotated

LOG2E = tl.constexpr(1.4426950408889634)
END = tl.constexpr(_END)


@triton.jit
def _codes_to(codes: tl.tensor, FORMAT: tl.constexpr, DTYPE: tl.constexpr, AXIS: tl.constexpr) -> tl.tensor:
    """Converts a cache's codes to the queries' type, without their scale; "e4m3" codes are also divided by 256.

    The conversion is exact, except from float32 to 16 bits. Scales are applied to the sums instead of to each element.
    Channels are along ``AXIS``, of which "rotated4" has two in a byte.
    """
    if FORMAT == "rotated4":
        both = tl.join(normal_integers(codes & 15), normal_integers(codes >> 4))
        if AXIS == 0:
            numbers = tl.reshape(tl.permute(both, (0, 2, 1)), [2 * codes.shape[0], codes.shape[1]])
        else:
            numbers = tl.reshape(both, [codes.shape[0], 2 * codes.shape[1]])
    elif FORMAT == "e4m3":
        numbers = e4m3_to_half(codes)
    elif FORMAT == "fp8":
        numbers = codes.to(tl.float16)
    else:
        numbers = codes
    return numbers.to(DTYPE)


@triton.jit
def _block_of(
    table: tl.tensor,
    start: tl.tensor,
    page: tl.constexpr,
    low: tl.tensor,
    high: tl.tensor,
    pool: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    CLAMP: tl.constexpr,
) -> tl.tensor:
    """Returns the block of the keys from ``start + page * BLOCK_SIZE`` on; 0 if none of them is in [low, high).

    With CLAMP, the result is limited to the ``pool`` blocks.
    """
    begins = start + page * BLOCK_SIZE
    there = (begins < high) & (begins + BLOCK_SIZE > low)
    block = tl.load(table + begins // BLOCK_SIZE, mask=there, other=0)
    if CLAMP:
        block = tl.minimum(tl.maximum(block, 0), pool - 1)
    return block


@triton.jit
def _blocks_of(
    table: tl.tensor,
    start: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    pool: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
    CLAMP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Returns the blocks of the keys from ``start`` on; the first PAGES of the four values are used."""
    a = _block_of(table, start, 0, low, high, pool, BLOCK_SIZE, CLAMP) if PAGES >= 1 else start
    b = _block_of(table, start, 1, low, high, pool, BLOCK_SIZE, CLAMP) if PAGES >= 2 else a
    c = _block_of(table, start, 2, low, high, pool, BLOCK_SIZE, CLAMP) if PAGES >= 4 else a
    d = _block_of(table, start, 3, low, high, pool, BLOCK_SIZE, CLAMP) if PAGES >= 4 else a
    return a, b, c, d


@triton.jit
def _places(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    pool: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    PAGES: tl.constexpr,
    CLAMP: tl.constexpr,
) -> tl.tensor:
    """Returns the indices in [P*K] of the KEYS keys from ``start`` on, int64; from blocks a to d, or from the table if
    PAGES is 0.
    """
    offset = tl.arange(0, KEYS)
    if PAGES == 0:
        key = start + offset
        block = tl.load(table + key // BLOCK_SIZE, mask=(key >= low) & (key < high), other=0).to(tl.int64)
        if CLAMP:
            block = tl.minimum(tl.maximum(block, 0), pool - 1)
        return block * BLOCK_SIZE + key % BLOCK_SIZE
    if PAGES == 1:
        return a.to(tl.int64) * BLOCK_SIZE + start % BLOCK_SIZE + offset
    page = offset // BLOCK_SIZE
    block = tl.where(page == 0, a, b)
    if PAGES == 4:
        block = tl.where(page == 2, c, tl.where(page == 3, d, block))
    return block.to(tl.int64) * BLOCK_SIZE + offset % BLOCK_SIZE


@triton.jit
def _attend(
    queries: tl.tensor,
    rest: tl.tensor,
    position: tl.tensor,
    slope: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    place: tl.tensor,
    start: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    C: tl.constexpr,
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Processes the KEYS keys from ``start`` on in one step of online softmax; returns the new (largest, total,
    values).

    ``place`` [KEYS] has the keys' indices in [P*K, Nkv]. Without MASKED, all KEYS keys exist, and every row sees them.
    If a key has a rest (``AttentionConstants``), ``rest`` [ROWS, REST_WIDTH] are those channels of the queries.
    """
    PACK: tl.constexpr = 2 if FORMAT == "rotated4" else 1  # channels of a byte or a float
    KEY_PART: tl.constexpr = (C.HEAD_SIZE - C.REST_SIZE) // PACK
    VALUE_PART: tl.constexpr = C.VALUE_SIZE // PACK
    d = tl.arange(0, C.WIDTH // PACK)
    e = tl.arange(0, C.VALUE_WIDTH // PACK)
    key = start + tl.arange(0, C.KEYS)
    present = (key >= low) & (key < high)
    at_keys = k_cache + place[None, :] * (C.HEAD_SIZE // PACK) + d[:, None]
    at_values = v_cache + place[:, None] * (C.VALUE_STRIDE // PACK) + e[None, :]
    if MASKED:
        keys = tl.load(at_keys, mask=present[None, :] & (d < KEY_PART)[:, None], other=0.0)  # [WIDTH, KEYS]
    elif KEY_PART < C.WIDTH // PACK:
        keys = tl.load(at_keys, mask=(d < KEY_PART)[:, None], other=0.0)
    else:
        keys = tl.load(at_keys)
    scores = tl.dot(queries, _codes_to(keys, FORMAT, queries.dtype, 0), input_precision="ieee")  # [ROWS, KEYS]
    if C.REST_SIZE:
        r = tl.arange(0, C.REST_WIDTH)
        at_rest = k_cache + place[None, :] * C.HEAD_SIZE + (KEY_PART + r)[:, None]
        rest_keys = tl.load(at_rest, mask=present[None, :] & (r < C.REST_SIZE)[:, None], other=0.0)
        scores = tl.dot(rest, _codes_to(rest_keys, FORMAT, queries.dtype, 0), scores, input_precision="ieee")

    # A factor that all scores share needn't be multiplied into each of them before the largest is found.
    SHARED: tl.constexpr = FORMAT == "float" and C.SOFTCAP == 0.0 and not C.SLOPES and C.SCALE > 0.0
    FACTOR: tl.constexpr = C.SCALE * (LOG2E if C.SOFTCAP == 0.0 else 1.0) * (256.0 if FORMAT == "e4m3" else 1.0)
    if not SHARED:
        if FORMAT == "float":
            scores *= FACTOR
        else:
            scores *= (tl.load(k_scales + place, mask=present, other=0.0).to(tl.float32) * FACTOR)[None, :]
        if C.SOFTCAP != 0.0:
            fall = tl.exp2(tl.abs(scores) * (-2.0 * LOG2E / C.SOFTCAP))
            bent = (1.0 - fall) / (1.0 + fall) * (C.SOFTCAP * LOG2E)  # tanh
            scores = tl.where(scores < 0, -bent, bent)
        if C.SLOPES:
            scores = tl.fma(slope[:, None], (key[None, :] - position[:, None]).to(tl.float32), scores)
    if MASKED:
        if C.QUERIES == 1:  # keys from low to high are those that the one query sees
            visible = present[None, :]
        else:
            visible = present[None, :] & (key[None, :] <= position[:, None])
            if C.WINDOW:
                visible &= key[None, :] > position[:, None] - C.WINDOW
            if C.ENDS:
                near = (key < END)[None, :] | ((key // END)[None, :] >= (position // END)[:, None] - 1)
                visible &= near if FORMAT == "rotated8" else ~near
        scores = tl.where(visible, scores, float("-inf"))

    if SHARED:
        larger = tl.maximum(largest, tl.max(scores, axis=1) * FACTOR)
    else:
        larger = tl.maximum(largest, tl.max(scores, axis=1))
    base = larger
    if MASKED:
        base = tl.where(larger == float("-inf"), 0.0, larger)  # no key seen yet
    if SHARED:
        weights = tl.exp2(tl.fma(scores, FACTOR, -base[:, None]))
    else:
        weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    total = tl.fma(total, shrink, tl.sum(weights, axis=1))

    # Values that are a part of keys are loaded a second time: the compiler copies no tile ahead that has two uses.
    if MASKED:
        cached_values = tl.load(at_values, mask=present[:, None] & (e < VALUE_PART)[None, :], other=0.0)
    elif VALUE_PART < C.VALUE_WIDTH // PACK:
        cached_values = tl.load(at_values, mask=(e < VALUE_PART)[None, :], other=0.0)
    else:
        cached_values = tl.load(at_values)  # [KEYS, VALUE_WIDTH]
    if FORMAT != "float":
        # Times a power of 2, which ``values`` are divided by in the end: float16 holds no number as small as a scale.
        UNIT: tl.constexpr = 256.0 if FORMAT == "fp8" or FORMAT == "e4m3" else 64.0
        weights *= (tl.load(v_scales + place, mask=present, other=0.0).to(tl.float32) * UNIT)[None, :]
    values = tl.dot(
        weights.to(queries.dtype),
        _codes_to(cached_values, FORMAT, queries.dtype, 1),
        values * shrink[:, None],
        input_precision="ieee",
    )
    return larger, total, values


@triton.jit
def _attend_range(
    queries: tl.tensor,
    rest: tl.tensor,
    position: tl.tensor,
    slope: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    table: tl.tensor,
    pool: tl.tensor,
    tokens: tl.tensor,
    first: tl.tensor,
    before: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    kv_head: tl.tensor,
    C: tl.constexpr,
    FORMAT: tl.constexpr,
    CLAMP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Processes the keys from ``low`` to ``high`` (exclusive) of one cache; returns the new (largest, total, values).

    Arguments are those of ``attend_tile`` and ``_attend``. ``FORMAT`` is that of the cache.
    """
    # Blocks of a tile of keys; 0: no whole number, or many, and each key's is looked up.
    PAGES: tl.constexpr = (
        1 if C.BLOCK_SIZE % C.KEYS == 0 else 2 if C.KEYS == 2 * C.BLOCK_SIZE else 4 if C.KEYS == 4 * C.BLOCK_SIZE else 0
    )
    begin = low // C.KEYS * C.KEYS
    # Keys that every row sees need no mask: up to the first query's own, and behind the last one's window. A single
    # query's are in one loop, as splits are short, and so are the ends.
    ONE_LOOP: tl.constexpr = C.QUERIES == 1 or (C.ENDS and FORMAT == "rotated8")
    clear = high
    edge = high
    if not ONE_LOOP:
        seen_from = low
        if C.WINDOW:
            seen_from = tl.maximum(low, before + tl.minimum(first + C.QUERIES, tokens) - C.WINDOW)
        clear = (seen_from + C.KEYS - 1) // C.KEYS * C.KEYS
        seen_to = before + first + 1
        if C.ENDS:
            seen_to = tl.minimum(seen_to, _near(before + first))
        edge = tl.maximum(tl.minimum(seen_to, high) // C.KEYS * C.KEYS, clear)
    for part in tl.static_range(3):
        if part == 0:
            from_key = begin
            to_key = tl.minimum(clear, high)
            there = ONE_LOOP or C.WINDOW > 0 or C.SPLIT_KEYS % C.KEYS != 0
        elif part == 1:
            from_key = clear
            to_key = edge
            there = not ONE_LOOP
        else:
            from_key = edge
            to_key = high
            there = not ONE_LOOP
        if there:
            next_a, next_b, next_c, next_d = _blocks_of(table, from_key, low, to_key, pool, C.BLOCK_SIZE, PAGES, CLAMP)
            for start in range(from_key, to_key, C.KEYS):
                a, b, c, d = next_a, next_b, next_c, next_d
                if C.AHEAD:  # copies of keys and values wait for no block, and may be several steps ahead
                    next_a, next_b, next_c, next_d = _blocks_of(
                        table, start + C.KEYS, low, to_key, pool, C.BLOCK_SIZE, PAGES, CLAMP
                    )
                else:
                    a, b, c, d = _blocks_of(table, start, low, to_key, pool, C.BLOCK_SIZE, PAGES, CLAMP)
                place = _places(a, b, c, d, table, start, low, high, pool, C.BLOCK_SIZE, C.KEYS, PAGES, CLAMP)
                place = place * C.KV_HEADS + kv_head
                largest, total, values = _attend(
                    queries, rest, position, slope, largest, total, values,
                    k_cache, v_cache, k_scales, v_scales, place, start, low, high, C, FORMAT, MASKED=part != 1,
                )  # fmt: skip
    return largest, total, values


@triton.jit
def _near(position: tl.tensor) -> tl.tensor:
    """Returns the first key behind run 0 that the query at ``position`` reads among the ends."""
    return tl.maximum(position // END - 1, 1) * END


@triton.jit
def _attend_caches(
    queries: tl.tensor,
    rest: tl.tensor,
    position: tl.tensor,
    slope: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    table: tl.tensor,
    k_cache_ends: tl.tensor,
    v_cache_ends: tl.tensor,
    k_scales_ends: tl.tensor,
    v_scales_ends: tl.tensor,
    ends_table: tl.tensor,
    pool: tl.tensor,
    tokens: tl.tensor,
    first: tl.tensor,
    before: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    kv_head: tl.tensor,
    C: tl.constexpr,
    CLAMP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Processes the keys from ``low`` to ``high`` (exclusive) of all caches; returns (largest, total, values).

    Values have no power of 2 as a factor any more, and aren't rotated. Arguments are those of ``attend_tile``.
    """
    PIECES: tl.constexpr = 3 if C.ENDS else 1
    for piece in tl.static_range(PIECES):
        if piece == 1 or not C.ENDS:
            keys, cached_values, key_scales, value_scales, blocks = k_cache, v_cache, k_scales, v_scales, table
        else:
            keys, cached_values, key_scales, value_scales = k_cache_ends, v_cache_ends, k_scales_ends, v_scales_ends
            blocks = ends_table
        from_key = low
        to_key = high
        if C.ENDS:
            if piece == 0:
                to_key = tl.minimum(high, END)
            elif piece == 1:
                from_key = tl.maximum(low, END)
                to_key = tl.minimum(high, _near(before + tl.minimum(first + C.QUERIES, tokens) - 1))
            else:
                from_key = tl.maximum(low, _near(before + first))
        largest, total, values = _attend_range(
            queries, rest, position, slope, largest, total, values, keys, cached_values, key_scales, value_scales,
            blocks, pool, tokens, first, before, from_key, to_key, kv_head,
            C, C.FORMAT if piece == 1 or not C.ENDS else "rotated8", CLAMP,
        )  # fmt: skip
    if C.FORMAT == "fp8":  # of "e4m3" the codes were divided by it
        values = values * (1.0 / 256.0)
    elif C.FORMAT != "float" and C.FORMAT != "e4m3":
        values = values * (1.0 / 64.0)
    if C.FORMAT == "rotated8" or C.FORMAT == "rotated4":
        values = rotated(values, C.VALUE_SIZE, False, C.ROWS, C.VALUE_WIDTH)
    return largest, total, values


@triton.jit
def merged(
    largest: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    part_largest: tl.tensor,
    part_total: tl.tensor,
    part_values: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds a part's sums [ROWS] and [ROWS, VALUE_WIDTH] to those of the parts before it, each about its own largest
    score. One function for all kernels: a compiler that fuses other operations changes bits.
    """
    larger = tl.maximum(largest, part_largest)
    base = tl.where(larger == float("-inf"), 0.0, larger)  # no key seen yet
    keep = tl.exp2(largest - base)
    share = tl.exp2(part_largest - base)
    total = tl.fma(total, keep, part_total * share)
    values = tl.fma(values, keep[:, None], part_values * share[:, None])
    return larger, total, values


@triton.jit
def attend_tile(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    table: tl.tensor,
    k_cache_ends: tl.tensor,
    v_cache_ends: tl.tensor,
    k_scales_ends: tl.tensor,
    v_scales_ends: tl.tensor,
    ends_table: tl.tensor,
    pool: tl.tensor,
    sinks: tl.tensor,
    slopes: tl.tensor,
    q_stride: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    first_token: tl.tensor,
    out_token: tl.tensor,
    tokens: tl.tensor,
    first: tl.tensor,
    before: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    share: tl.tensor,
    split: tl.tensor,
    splits: tl.tensor,
    sink_split: tl.tensor,
    C: tl.constexpr,
    CLAMP: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """Computes attention of one tile over the keys from ``low`` to ``high`` (exclusive), and writes the result.

    At least one key is in that range. Arguments not listed here are those of the kernels.

    With EXACT, each EXACT keys at absolute positions are a part with sums of its own, and parts are merged in order,
    sinks first. If SPLIT_KEYS is EXACT too, the range is in one part, ``out`` gets its sum of values as it is, and
    ``lse`` [.., 2] its largest score and its sum of weights; ``merge_parts_kernel`` merges them.

    Args:
        first_token: the request's first token in the step.
        out_token: the request's first row in ``out`` and ``lse``.
        tokens: the number of the request's tokens.
        first: the tile's first token among them.
        before: the number of keys before the request's first token.
        share: the number of the tile's query heads, among KV_HEADS * SHARES equal shares.
        sink_split: the split that includes the sinks.
    """
    GROUP: tl.constexpr = C.Q_HEADS // (C.KV_HEADS * C.SHARES)
    KEY_PART: tl.constexpr = C.HEAD_SIZE - C.REST_SIZE
    row = tl.arange(0, C.ROWS)
    query = first + row // GROUP
    head = share * GROUP + row % GROUP
    kv_head = share // C.SHARES
    valid = (row // GROUP < C.QUERIES) & (query < tokens)  # [ROWS]
    position = before + query
    token = (first_token + query).to(tl.int64)
    row_place = (out_token + query).to(tl.int64) * C.Q_HEADS + head  # [ROWS], in [T, Nq]

    element = tl.arange(0, C.WIDTH)
    e = tl.arange(0, C.VALUE_WIDTH)
    at_queries = q + token[:, None] * q_stride + (head * C.HEAD_SIZE)[:, None]
    queries = tl.load(
        at_queries + element[None, :], mask=valid[:, None] & (element < KEY_PART)[None, :], other=0.0
    )  # [ROWS, WIDTH]
    rest = queries
    if C.REST_SIZE:
        r = tl.arange(0, C.REST_WIDTH)
        rest = tl.load(
            at_queries + (KEY_PART + r)[None, :], mask=valid[:, None] & (r < C.REST_SIZE)[None, :], other=0.0
        )
    if C.FORMAT == "rotated8" or C.FORMAT == "rotated4":
        queries = rotated(queries, C.HEAD_SIZE, False, C.ROWS, C.WIDTH).to(queries.dtype)
    largest = tl.full([C.ROWS], float("-inf"), tl.float32)
    total = tl.zeros([C.ROWS], tl.float32)
    values = tl.zeros([C.ROWS, C.VALUE_WIDTH], tl.float32)
    if C.SINKS and not (EXACT and C.SPLIT_KEYS):
        sunk = valid & (row * 0 + split == sink_split)
        largest = tl.load(sinks + head, mask=sunk, other=float("-inf")).to(tl.float32) * LOG2E
        total += tl.where(sunk, 1.0, 0.0)
    slope = total
    if C.SLOPES:
        slope = tl.load(slopes + head, mask=valid, other=0.0).to(tl.float32) * LOG2E

    if EXACT and not C.SPLIT_KEYS:
        for part in range(low // EXACT, (high + EXACT - 1) // EXACT):
            of_largest, of_total, of_values = _attend_caches(
                queries, rest, position, slope,
                tl.full([C.ROWS], float("-inf"), tl.float32),
                tl.zeros([C.ROWS], tl.float32),
                tl.zeros([C.ROWS, C.VALUE_WIDTH], tl.float32),
                k_cache, v_cache, k_scales, v_scales, table,
                k_cache_ends, v_cache_ends, k_scales_ends, v_scales_ends, ends_table, pool, tokens, first, before,
                tl.maximum(low, part * EXACT), tl.minimum(high, (part + 1) * EXACT), kv_head, C, CLAMP,
            )  # fmt: skip
            largest, total, values = merged(largest, total, values, of_largest, of_total, of_values)
    else:
        largest, total, values = _attend_caches(
            queries, rest, position, slope, largest, total, values, k_cache, v_cache, k_scales, v_scales, table,
            k_cache_ends, v_cache_ends, k_scales_ends, v_scales_ends, ends_table, pool, tokens, first, before,
            low, high, kv_head, C, CLAMP,
        )  # fmt: skip

    seen = tl.where(total == 0.0, 1.0, total)  # rows of no query
    inside = valid[:, None] & (e < C.VALUE_SIZE)[None, :]
    if EXACT and C.SPLIT_KEYS:
        to = row_place * splits + split
        tl.store(out + to[:, None] * C.VALUE_SIZE + e[None, :], values, mask=inside)
        tl.store(lse + 2 * to, largest, mask=valid)
        tl.store(lse + 2 * to + 1, total, mask=valid)
        return
    values = values / seen[:, None]
    if C.SPLIT_KEYS:
        to = row_place * splits + split
        tl.store(out + to[:, None] * C.VALUE_SIZE + e[None, :], values, mask=inside)
        tl.store(lse + to, tl.where(total == 0.0, float("-inf"), largest + tl.log2(seen)), mask=valid)
    else:
        tl.store(out + row_place[:, None] * C.VALUE_SIZE + e[None, :], values.to(out.dtype.element_ty), mask=inside)
