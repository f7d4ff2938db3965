"""Triton kernels of a step's small ops: embedding, norms, rotations, gated activations.

They compute in float32 for any type of operand. Strides and sizes are constants; a "row" is the last dimension.
Pointers are those of the operands' first elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cache_kernels import e4m3_to_half, store_heads


@triton.jit
def stored_to_float(codes: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """Converts a weight's codes to float32, without its scale. FORMAT is "float", "int8", "fp8" (a pointer of that
    type) or "e4m3" (bytes).
    """
    return e4m3_to_half(codes).to(tl.float32) * 256.0 if FORMAT == "e4m3" else codes.to(tl.float32)


@triton.jit
def nibble_of(codes: tl.tensor, place: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """Returns one of the two values in each byte, int32: the low half if ``place`` is even. "int4" is signed, "uint4"
    isn't.
    """
    value = (codes.to(tl.int32) >> ((place % 2) * 4)) & 15
    return ((value ^ 8) - 8) if FORMAT == "int4" else value


@triton.jit
def embedding_kernel(
    ids: tl.tensor,
    table: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    WIDTH: tl.constexpr,
    BY_GROUP: tl.constexpr,
) -> None:
    """Looks up ids [T] in the table [ROWS, SIZE] -> out [T, SIZE]; grid (T). An id outside the table gives zeros.

    ``FORMAT`` is one of ``stored_to_float``, or "int4" or "uint4" with two values to a byte. GROUP 0: a row is one
    group. BY_GROUP is as for ``ProductConstants``.
    """
    token = tl.program_id(0)
    d = tl.arange(0, WIDTH)
    token_id = tl.load(ids + token).to(tl.int64)
    row = tl.minimum(tl.maximum(token_id, 0), ROWS - 1)
    inside = d < SIZE
    GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP if GROUP else 1
    group = d // GROUP if GROUP else d * 0
    at = group * BY_GROUP + row if BY_GROUP else row * GROUPS + group
    place = at * GROUP + d % GROUP if BY_GROUP else row * SIZE + d
    if FORMAT == "int4" or FORMAT == "uint4":
        value = nibble_of(tl.load(table + place // 2, mask=inside, other=0), d, FORMAT).to(tl.float32)
    else:
        value = stored_to_float(tl.load(table + place, mask=inside, other=0.0), FORMAT)
    if FORMAT != "float":
        value *= tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
        if OFFSETS:
            value += tl.load(offsets + at, mask=inside, other=0.0).to(tl.float32)
    to = out + token.to(tl.int64) * OUT_STRIDE + d
    tl.store(to, tl.where(row == token_id, value, 0.0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row_at(row: tl.tensor, INNER: tl.constexpr, OUTER_STRIDE: tl.constexpr, STRIDE: tl.constexpr) -> tl.tensor:
    """Returns the offset of row ``row`` in an operand [.., INNER, C]."""
    return (row // INNER) * OUTER_STRIDE + (row % INNER) * STRIDE


@triton.jit
def norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    X_OUTER: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_OUTER: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_OUTER: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    TOTAL_OUTER: tl.constexpr,
    TOTAL_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    LAYER: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Computes the RMS norm, or with LAYER the layer norm, of x [.., INNER, SIZE], plus ``residual`` with RESIDUAL;
    grid (rows).

    ``total`` gets the sum of both, and the norm is computed from its rounded values.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    inside = c < SIZE
    values = tl.load(x + _row_at(row, INNER, X_OUTER, X_STRIDE) + c, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        at = residual + _row_at(row, INNER, RESIDUAL_OUTER, RESIDUAL_STRIDE) + c
        summed = (values + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + _row_at(row, INNER, TOTAL_OUTER, TOTAL_STRIDE) + c, summed, mask=inside)
        values = summed.to(tl.float32)
    if LAYER:
        mean = tl.sum(values, axis=0) / SIZE
        values = tl.where(inside, values - mean, 0.0)
    variance = tl.sum(values * values, axis=0) / SIZE
    values = values * (1.0 / tl.sqrt_rn(variance + EPS))
    if WEIGHT:
        values *= tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        values += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    at = out + _row_at(row, INNER, OUT_OUTER, OUT_STRIDE) + c
    tl.store(at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(
    x: tl.tensor,
    table: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    FREQUENCIES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEAD_ROOM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Returns a token's x [HEADS, SIZE] rotated by its row [2 F] of the table, as float32 [HEAD_ROOM, WIDTH] padded
    with 0.
    """
    head = tl.arange(0, HEAD_ROOM)
    d = tl.arange(0, WIDTH)
    inside = (head < HEADS)[:, None] & (d < SIZE)[None, :]
    turned = d < 2 * FREQUENCIES
    if INTERLEAVED:
        partner = d ^ 1
        frequency = d // 2
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(d < FREQUENCIES, d + FREQUENCIES, d - FREQUENCIES)
        frequency = d % FREQUENCIES
        sign = tl.where(d < FREQUENCIES, -1.0, 1.0)
    at = x + head[:, None] * STRIDE
    element = tl.load(at + d[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at + partner[None, :], mask=inside & turned[None, :], other=0.0).to(tl.float32)
    cos = tl.load(table + frequency, mask=turned, other=1.0)
    sin = tl.load(table + FREQUENCIES + frequency, mask=turned, other=0.0) * sign
    return element * cos[None, :] + other * sin[None, :]


@triton.jit
def rope_kernel(
    x: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    X_OUTER: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_OUTER: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FREQUENCIES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEAD_ROOM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Rotates x [T, HEADS, SIZE] by the table [T, 2F] float32 (cosines, then sines) -> out, as ``ew.rope``;
    grid (T).
    """
    token = tl.program_id(0).to(tl.int64)
    values = _rotated(
        x + token * X_OUTER,
        table + token * (2 * FREQUENCIES),
        HEADS,
        SIZE,
        X_STRIDE,
        FREQUENCIES,
        INTERLEAVED,
        HEAD_ROOM,
        WIDTH,
    )
    head = tl.arange(0, HEAD_ROOM)
    d = tl.arange(0, WIDTH)
    to = out + token * OUT_OUTER + head[:, None] * OUT_STRIDE + d[None, :]
    tl.store(to, values.to(out.dtype.element_ty), mask=(head < HEADS)[:, None] & (d < SIZE)[None, :])


@triton.jit(do_not_specialize=["capacity"])
def rope_kv_write_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    table: tl.tensor,
    slots: tl.tensor,
    capacity: tl.tensor,
    out: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    Q_OUTER: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_OUTER: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_OUTER: tl.constexpr,
    V_STRIDE: tl.constexpr,
    OUT_OUTER: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FREQUENCIES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FORMAT: tl.constexpr,
    HEAD_ROOM: tl.constexpr,
    KV_ROOM: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
) -> None:
    """Rotates q into ``out`` and k into the cache as ``ew.rope``, and writes v into the cache; grid (T, 3).

    Caches and slots are as for ``kv_write_kernel``: padding has slot -1.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    turn = table + token * (2 * FREQUENCIES)
    slot = tl.load(slots + token).to(tl.int64)
    in_cache = (slot >= 0) & (slot < capacity)
    d = tl.arange(0, WIDTH)
    if part == 0:
        head = tl.arange(0, HEAD_ROOM)
        of = q + token * Q_OUTER
        turned = _rotated(of, turn, HEADS, SIZE, Q_STRIDE, FREQUENCIES, INTERLEAVED, HEAD_ROOM, WIDTH)
        to = out + token * OUT_OUTER + head[:, None] * OUT_STRIDE + d[None, :]
        tl.store(to, turned.to(out.dtype.element_ty), mask=(head < HEADS)[:, None] & (d < SIZE)[None, :])
    if (part == 1) & in_cache:
        of = k + token * K_OUTER
        keys = _rotated(of, turn, KV_HEADS, SIZE, K_STRIDE, FREQUENCIES, INTERLEAVED, KV_ROOM, WIDTH)
        rounded = keys.to(k.dtype.element_ty)  # as if it had been stored between rotation and write
        store_heads(rounded, k_cache, k_scales, slot, KV_HEADS, SIZE, FORMAT, KV_ROOM, WIDTH)
    if (part == 2) & in_cache:
        head = tl.arange(0, KV_ROOM)
        e = tl.arange(0, VALUE_WIDTH)
        at = v + token * V_OUTER + head[:, None] * V_STRIDE + e[None, :]
        values = tl.load(at, mask=(head < KV_HEADS)[:, None] & (e < VALUE_SIZE)[None, :], other=0.0)
        store_heads(values, v_cache, v_scales, slot, KV_HEADS, VALUE_SIZE, FORMAT, KV_ROOM, VALUE_WIDTH)


@triton.jit
def activated(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Returns x after the activation KIND, in float32: silu, gelu, gelu_tanh, relu, relu2 (squared), sigmoid, tanh, or
    "" for none.
    """
    if KIND == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))  # tanh(y) is 2 sigmoid(2y) - 1
    elif KIND == "relu":
        x = tl.where(x > 0, x, x * 0.0)
    elif KIND == "relu2":
        x = tl.where(x > 0, x * x, x * 0.0)
    elif KIND == "sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
    elif KIND == "tanh":
        x = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
    return x


@triton.jit
def gated_activation_kernel(
    x: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    X_OUTER: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_OUTER: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    UP: tl.constexpr = 0,
) -> None:
    """Computes x [.., INNER, 2 SIZE] -> out [.., INNER, SIZE]: KIND(first half) * second half; grid (rows, pieces of
    WIDTH).

    UP is the distance in elements from one half to the other if it isn't SIZE.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = c < SIZE
    at = x + _row_at(row, INNER, X_OUTER, X_STRIDE) + c
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + (UP if UP else SIZE), mask=inside, other=0.0).to(tl.float32)
    to = out + _row_at(row, INNER, OUT_OUTER, OUT_STRIDE) + c
    tl.store(to, (activated(gate, KIND) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def activation_kernel(
    x: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    KIND: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    SIZE_3: tl.constexpr,
    X_0: tl.constexpr,
    X_1: tl.constexpr,
    X_2: tl.constexpr,
    X_3: tl.constexpr,
    OUT_0: tl.constexpr,
    OUT_1: tl.constexpr,
    OUT_2: tl.constexpr,
    OUT_3: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Computes KIND(x) -> out for ``count`` elements of [.., SIZE_1, SIZE_2, SIZE_3] with any strides; grid (pieces of
    WIDTH).

    Every element is computed by the same instructions. A library may use others for the last elements.
    """
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = i < count
    first = (i // (SIZE_1 * SIZE_2 * SIZE_3)).to(tl.int64)
    second = i // (SIZE_2 * SIZE_3) % SIZE_1
    third = i // SIZE_3 % SIZE_2
    last = i % SIZE_3
    at = x + first * X_0 + second * X_1 + third * X_2 + last * X_3
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    to = out + first * OUT_0 + second * OUT_1 + third * OUT_2 + last * OUT_3
    tl.store(to, activated(value, KIND).to(out.dtype.element_ty), mask=inside)


@triton.jit
def reduce_kernel(
    x: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    X_OUTER: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_OUTER: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Computes x [.., INNER, SIZE] -> out [.., INNER, 1]: the sum, mean or logsumexp of each row, in float32; grid
    (rows).

    It reads WIDTH elements at a time. The order of the sum doesn't depend on the number of rows, as it does in a
    library.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    at = x + _row_at(row, INNER, X_OUTER, X_STRIDE) + c
    total = tl.zeros([WIDTH], tl.float32)
    if KIND == "logsumexp":
        largest = tl.full([WIDTH], float("-inf"), tl.float32)
        for start in range(0, SIZE, WIDTH):
            values = tl.load(at + start, mask=start + c < SIZE, other=float("-inf")).to(tl.float32)
            largest = tl.maximum(largest, values, propagate_nan=tl.PropagateNan.ALL)
        top = tl.max(largest, axis=0)
        base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
        for start in range(0, SIZE, WIDTH):
            values = tl.load(at + start, mask=start + c < SIZE, other=float("-inf")).to(tl.float32)
            total += tl.exp(values - base)
        result = base + tl.log(tl.sum(total, axis=0))
    else:
        for start in range(0, SIZE, WIDTH):
            total += tl.load(at + start, mask=start + c < SIZE, other=0.0).to(tl.float32)
        result = tl.sum(total, axis=0)
        if KIND == "mean":
            result = result / SIZE
    tl.store(out + _row_at(row, INNER, OUT_OUTER, OUT_STRIDE), result.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["count"])
def invert_order_kernel(order: tl.tensor, places: tl.tensor, count: tl.tensor, WIDTH: tl.constexpr) -> None:
    """Computes places[order[i]] = i for a permutation of ``count`` numbers; grid (pieces of WIDTH)."""
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = i < count
    tl.store(places + tl.load(order + i, mask=inside, other=0), i, mask=inside)


@triton.jit
def combine_experts_kernel(
    y: tl.tensor,
    places: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    WEIGHTS_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Adds the results of each token's K experts in the router's order: out[t] = the sum over j of weights[t, j] times
    y[places[t * K + j]]; grid (T, pieces of WIDTH).
    """
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = c < SIZE
    total = tl.zeros([WIDTH], tl.float32)
    for j in range(0, K):
        place = tl.load(places + token * K + j).to(tl.int64)
        values = tl.load(y + place * Y_STRIDE + c, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weights + token * WEIGHTS_STRIDE + j).to(tl.float32)
        total = tl.fma(values, weight + tl.zeros([WIDTH], tl.float32), total)
    tl.store(out + token * OUT_STRIDE + c, total.to(out.dtype.element_ty), mask=inside)
