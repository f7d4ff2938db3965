"""Triton kernels that write a step's keys and values into the paged cache, in floats or in 8 or 4 bits.

Arguments are in TensorRT's order: inputs, integers, outputs. A cache is both an input and an output, at the same
memory; kernels use the output.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_to_half(codes: tl.tensor) -> tl.tensor:
    """Converts uint8 codes of e4m3 to float16 divided by 256, exactly and by bits, for GPUs without an instruction for
    it.

    With exponent and mantissa moved to float16's bits, a value is 2^8 times too small (the biases are 7 and 15).
    """
    bits = codes.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def float_to_e4m3(values: tl.tensor) -> tl.tensor:
    """Rounds float32 values from -448 to 448 to uint8 codes of e4m3, to nearest, ties to even.

    Adding and subtracting 1.5 * 2^23 steps of the format rounds to a whole number of steps.
    """
    exponent = ((values.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
    step = ((tl.maximum(exponent, -6) - 3 + 127) << 23).to(tl.float32, bitcast=True)
    magic = step * 12582912.0
    rounded = (values + magic) - magic
    bits = (rounded * 0.00390625).to(tl.float16).to(tl.uint16, bitcast=True)
    return (((bits >> 8) & 0x80) | ((bits >> 7) & 0x7F)).to(tl.uint8)


@triton.constexpr_function
def _rotations(size: int) -> int:
    """Returns the logarithm of how many numbers of a head of ``size`` are rotated at a time: the largest power of 2
    that divides it.
    """
    return (size & -size).bit_length() - 1


@triton.constexpr_function
def _share(rotations: int, stored: bool) -> float:
    """Returns the power of 2 by which keys and values (``stored``), or queries and results, are multiplied."""
    return 2.0 ** -(rotations // 2) if stored else 2.0 ** (rotations // 2 - rotations)


@triton.jit
def _sums(x: tl.tensor, HALF: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Replaces numbers a and b of x [ROWS, WIDTH] that are HALF apart by their sum and their difference."""
    pairs = tl.reshape(x, [ROWS, WIDTH // (2 * HALF), 2, HALF])
    a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), [ROWS, WIDTH])


@triton.jit
def rotated(
    x: tl.tensor, SIZE: tl.constexpr, STORED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    """Multiplies x [ROWS, WIDTH], heads of SIZE padded with 0, by a Hadamard matrix and its share; returns float32.

    The order of sums is that of ``passes.ops.quantized_cache.rotate``. For STORED see ``_share``.
    """
    ROTATIONS: tl.constexpr = _rotations(SIZE)
    x = x.to(tl.float32) * _share(ROTATIONS, STORED)
    for level in tl.static_range(ROTATIONS):
        x = _sums(x, 1 << (ROTATIONS - 1 - level), ROWS, WIDTH)
    return x


NORMAL_BOUNDS = tl.constexpr((-111.5, -85.5, -66.5, -51, -37.5, -24.5, -12, 0, 12, 24.5, 37.5, 51, 66.5, 85.5, 111.5))
"""The middles between neighbours of ``passes.ops.quantized_cache.NORMAL``."""


@triton.jit
def normal_integers(codes: tl.tensor) -> tl.tensor:
    """Returns the int32 of 4-bit codes: ``passes.ops.quantized_cache.NORMAL``, whose 8 magnitudes are two constants."""
    codes = codes.to(tl.int32)
    negative = codes < 8
    place = tl.where(negative, 7 - codes, codes - 8)
    magnitudes = tl.where(place < 4, 0x2C1F1206, 0x7F604B3A)
    magnitude = (magnitudes >> ((place & 3) * 8)) & 0xFF
    return tl.where(negative, -magnitude, magnitude)


@triton.jit
def _heads(
    new: tl.tensor, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    """Loads a token's ``new`` [Nkv, SIZE] as [HEADS, WIDTH], which are powers of 2, padded with 0."""
    head = tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    inside = (head < KV_HEADS)[:, None] & (d < SIZE)[None, :]
    return tl.load(new + head[:, None] * SIZE + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_heads(
    x: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    slot: tl.tensor,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Writes a token's heads x [HEADS, WIDTH], which are padded with 0, to ``slot`` of the cache [P*K, Nkv, SIZE].

    4-bit codes are two to a byte: of even channels in the low bits, of the odd ones behind them in the high bits.
    """
    head = tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    place = head[:, None] * SIZE + d[None, :]
    inside = (head < KV_HEADS)[:, None] & (d < SIZE)[None, :]
    to = cache + slot * (KV_HEADS * SIZE) + place
    if FORMAT == "float":
        tl.store(to, x.to(cache.dtype.element_ty), mask=inside)
    else:
        top: tl.constexpr = 448.0 if FORMAT == "e4m3" else 127.0
        if FORMAT == "rotated8" or FORMAT == "rotated4":
            x = rotated(x, SIZE, True, HEADS, WIDTH)
        else:
            x = x.to(tl.float32)
        largest = tl.max(tl.abs(x), axis=1)  # [HEADS]; a NaN may be lost in it
        infinite = tl.sum(((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32), axis=1) > 0
        # The factor is infinite below 2^-128 times top, where a head has scale 0.
        inverse = tl.div_rn(tl.full([HEADS], top, tl.float32), tl.where(largest > 0, largest, 1.0))
        usable = (largest > 0) & (inverse < float("inf")) & (infinite == 0)
        scale = tl.div_rn(largest, tl.full([HEADS], top, tl.float32))
        scale = tl.where(infinite, float("nan"), tl.where(usable, scale, 0.0))
        tl.store(scales + slot * KV_HEADS + head, scale.to(scales.dtype.element_ty), mask=head < KV_HEADS)
        # Between the bounds stands the product by itself: it can't be fused with the sum that rounds it.
        value = tl.where(usable[:, None], x * tl.where(usable, inverse, 0.0)[:, None], 0.0)
        value = tl.minimum(tl.maximum(value, -top), top)
        if FORMAT == "rotated4":
            codes = (value > NORMAL_BOUNDS[0]).to(tl.int32)
            for i in tl.static_range(1, 15):
                codes += (value > NORMAL_BOUNDS[i]).to(tl.int32)
            low, high = tl.split(tl.reshape(codes, [HEADS, WIDTH // 2, 2]))
            pair = tl.arange(0, WIDTH // 2)
            at = cache + slot * (KV_HEADS * SIZE // 2) + head[:, None] * (SIZE // 2) + pair[None, :]
            there = (head < KV_HEADS)[:, None] & (pair < SIZE // 2)[None, :]
            tl.store(at, (low | (high << 4)).to(tl.uint8), mask=there)
        elif FORMAT == "e4m3":
            tl.store(to, float_to_e4m3(value), mask=inside)
        else:
            tl.store(to, ((value + 12582912.0) - 12582912.0).to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["capacity"])
def kv_write_kernel(
    k: tl.tensor,
    v: tl.tensor,
    slots: tl.tensor,
    k_cache_before: tl.tensor,
    v_cache_before: tl.tensor,
    k_scales_before: tl.tensor,
    v_scales_before: tl.tensor,
    capacity: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
) -> None:
    """Writes k [T, Nkv, D] and v [T, Nkv, Dv] to ``slots`` [T] of the caches [P*K, Nkv, D] and [P*K, Nkv, Dv]; grid
    (T).

    A token whose slot isn't from 0 to capacity-1 is skipped: padding has slot -1. ``capacity`` is P*K. The strides are
    the elements from one token to the next in k and in v. The caches are written in place: an argument ``NAME_before``
    has the address of ``NAME``, and isn't used.

    KV_HEADS, HEAD_SIZE and VALUE_SIZE are Nkv, D and Dv; HEADS, WIDTH and VALUE_WIDTH are these rounded up to powers of
    two. With a VALUE_SIZE of 0 only keys are written; v and the cache of values may then be None.

    FORMAT is the format of both caches. In "float" the numbers are converted to the cache's type, and there are no
    scales. The other formats have a scale for each token and head, [P*K, Nkv]. "int8" and "e4m3" (as bytes) round as
    ``ew.quantized_kv_write`` does. "rotated8" (int8) and "rotated4" (two 4-bit codes in a byte) round as
    ``passes.ops.quantized_cache.quantize_to_few_bits``.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot >= 0) & (slot < capacity):
        keys = _heads(k + token * k_stride, KV_HEADS, HEAD_SIZE, HEADS, WIDTH)
        store_heads(keys, k_cache, k_scales, slot, KV_HEADS, HEAD_SIZE, FORMAT, HEADS, WIDTH)
        if VALUE_SIZE:
            values = _heads(v + token * v_stride, KV_HEADS, VALUE_SIZE, HEADS, VALUE_WIDTH)
            store_heads(values, v_cache, v_scales, slot, KV_HEADS, VALUE_SIZE, FORMAT, HEADS, VALUE_WIDTH)
