"""The Triton kernels of products with stored weights: 8-bit and 4-bit integers, 8-bit floats, and experts' weights of
any type.

They compute x [M, K] @ weight [N, K]^T. Stored values are exact in 16-bit floats. Scales are applied to float32 sums
over a group, and offsets to the sums of x, so that no weight is rounded to another float. Exceptions are ROUNDED, and
groups that aren't a multiple of a step along K: then weights are rounded to the type of x.

With many rows, a library multiplies faster than this kernel; ``unpack_kernel`` converts a weight to floats for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_kernels import request_of_tile
from .step_kernels import activated, stored_to_float


@triton.jit
def nibbles_to_floats(codes: tl.tensor, FORMAT: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Converts the two values in each byte of codes uint8 [.., D] to [.., D, 2] of DTYPE. That is exact in all 16-bit
    types.
    """
    if tl.bfloat16 == DTYPE or tl.float16 == DTYPE:
        # Two floats in 32 bits. The last bits of a float that is 128 (1024) have a place value of 1.
        SIGN: tl.constexpr = 8 if FORMAT == "int4" else 0
        MAGIC: tl.constexpr = ((0x4300 if tl.bfloat16 == DTYPE else 0x6400) + SIGN) * 0x10001
        LESS: tl.constexpr = (128.0 if tl.bfloat16 == DTYPE else 1024.0) + SIGN
        pair = ((codes.to(tl.int32) * 0x1001) & 0xF000F) ^ MAGIC
        low = (pair & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
        high = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        values = (tl.join(low, high).to(tl.float32) - LESS).to(DTYPE)
    else:
        low, high = (codes & 15).to(tl.int32), (codes >> 4).to(tl.int32)
        if FORMAT == "int4":
            low, high = (low ^ 8) - 8, (high ^ 8) - 8
        values = tl.join(low, high).to(tl.float32)
    return values


@triton.jit
def _sum_along(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    m: tl.tensor,
    end: tl.tensor,
    n: tl.tensor,
    expert: tl.tensor,
    from_k: tl.tensor,
    to_k: tl.tensor,
    C: tl.constexpr,
) -> tl.tensor:
    """Returns the products of rows m of x and rows n of an expert's weight, summed over K from ``from_k`` to ``to_k``:
    [ROWS, COLUMNS], or with SWAP [COLUMNS, ROWS]. Rows from ``end`` on are zeros. C is that of ``product_kernel``.
    """
    STEPS: tl.constexpr = C.STEPS
    NIBBLES: tl.constexpr = C.FORMAT == "int4" or C.FORMAT == "uint4"
    GROUPS: tl.constexpr = (C.K + C.GROUP - 1) // C.GROUP if C.GROUP else 1
    EVEN: tl.constexpr = C.K % (C.DEPTH * C.STEPS) == 0
    WHOLE: tl.constexpr = C.FORMAT != "float" and C.GROUP % C.DEPTH == 0  # a step along K lies in one group
    # One scale for all of K:
    LAST: tl.constexpr = C.FORMAT != "float" and C.GROUP == 0 and not C.OFFSETS and not C.CHAIN
    SCALED: tl.constexpr = C.ROUNDED and WHOLE and not LAST
    k = tl.arange(0, C.DEPTH)
    there, columns_inside = m < end, n < C.N
    line = expert * C.N + n.to(tl.int64)  # [COLUMNS], in [E, N]
    if C.SWAP:
        total = tl.zeros([C.COLUMNS, C.ROWS], tl.float32)
    else:
        total = tl.zeros([C.ROWS, C.COLUMNS], tl.float32)
    for turn in tl.range(from_k, to_k, C.DEPTH * C.STEPS, num_stages=C.STAGES):
        for step in tl.static_range(STEPS):
            start = turn + step * C.DEPTH
            inside = start + k < C.K
            at_x = x + m[:, None] * C.X_STRIDE + (start + k)[None, :]
            left = tl.load(at_x, mask=there[:, None] & (EVEN | inside[None, :]), other=0.0)  # [ROWS, DEPTH]
            group = start // C.GROUP if C.GROUP else 0
            block = (expert * GROUPS + group) * C.BY_GROUP
            scaled = columns_inside & (EVEN | (start < C.K))  # the last turn may have steps behind the weight's end
            if NIBBLES:
                half = start // 2 + tl.arange(0, C.DEPTH // 2)
                if C.BY_GROUP:
                    in_block = start % C.GROUP // 2 + tl.arange(0, C.DEPTH // 2)
                    at_codes = weight + block * (C.GROUP // 2) + (n[:, None] * (C.GROUP // 2) + in_block[None, :])
                else:
                    at_codes = weight + line[:, None] * (C.K // 2) + half[None, :]
                codes = tl.load(at_codes, mask=columns_inside[:, None] & (EVEN | (half < C.K // 2)[None, :]), other=0)
                right = tl.reshape(nibbles_to_floats(codes, C.FORMAT, left.dtype), [C.COLUMNS, C.DEPTH])
            else:
                if C.BY_GROUP:
                    at_codes = weight + block * C.GROUP + (n[:, None] * C.GROUP + (start % C.GROUP + k)[None, :])
                else:
                    at_codes = weight + line[:, None] * C.K + (start + k)[None, :]
                codes = tl.load(at_codes, mask=columns_inside[:, None] & (EVEN | inside[None, :]), other=0.0)
                right = codes if C.FORMAT == "float" else stored_to_float(codes, C.FORMAT)  # [COLUMNS, DEPTH]
            if C.FORMAT != "float" and not WHOLE:
                at = line[:, None] * GROUPS + ((start + k) // C.GROUP)[None, :]
                within = columns_inside[:, None] & inside[None, :]
                right = right.to(tl.float32) * tl.load(scales + at, mask=within, other=0.0).to(tl.float32)
                if C.OFFSETS:
                    right += tl.load(offsets + at, mask=within, other=0.0).to(tl.float32)
            if SCALED:
                at = block + n if C.BY_GROUP else line * GROUPS + group
                scale = tl.load(scales + at, mask=scaled, other=0.0).to(tl.float32)
                right = right.to(tl.float32) * scale[:, None]
                if C.OFFSETS:
                    right += tl.load(offsets + at, mask=scaled, other=0.0).to(tl.float32)[:, None]
            right = right.to(left.dtype)
            if C.SWAP:
                product = tl.dot(right, tl.trans(left), input_precision="ieee")  # [COLUMNS, ROWS]
            else:
                product = tl.dot(left, tl.trans(right), input_precision="ieee")  # [ROWS, COLUMNS]
            if not WHOLE or LAST or SCALED:
                total += product
            else:
                at = block + n if C.BY_GROUP else line * GROUPS + group
                scale = tl.load(scales + at, mask=scaled, other=0.0).to(tl.float32)
                total = tl.fma(product, scale[:, None] if C.SWAP else scale[None, :], total)
                if C.OFFSETS:
                    shift = tl.load(offsets + at, mask=scaled, other=0.0).to(tl.float32)
                    # Sums of x by the tensor cores: ones made of the codes, so that both products read x alike.
                    ones = tl.reshape(
                        nibbles_to_floats(((codes >> 7) >> 7) | 0x11, C.FORMAT, left.dtype), [C.COLUMNS, C.DEPTH]
                    )
                    ones = ones.to(left.dtype)
                    if C.SWAP:
                        total = tl.fma(tl.dot(ones, tl.trans(left), input_precision="ieee"), shift[:, None], total)
                    else:
                        total = tl.fma(tl.dot(left, tl.trans(ones), input_precision="ieee"), shift[None, :], total)
    return total


@triton.jit(do_not_specialize=["rows", "experts"])
def product_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    bias: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Computes ACTIVATION(x [M, K] @ weight [N, K]^T + bias [N]) -> out [M, N]. C has the constants
    (``ProductConstants``).

    Grid (tiles of ROWS rows, tiles of COLUMNS columns); ``rows`` is M. With GROUPED, row m uses the weight, scales and
    bias of the expert e with starts[e] <= m < starts[e + 1], and there are M // ROWS + experts tiles of rows.
    """
    LAST: tl.constexpr = C.FORMAT != "float" and C.GROUP == 0 and not C.OFFSETS and not C.CHAIN
    tile = tl.program_id(0)
    first = tile * C.ROWS
    end = rows
    which = tile * 0
    if C.GROUPED:
        which = request_of_tile(starts, tile, experts, C.ROWS)  # tiles of experts lie as those of requests do
        begin = tl.load(starts + which)
        end = tl.load(starts + which + 1)
        first = begin + (tile - (begin // C.ROWS + which)) * C.ROWS
        if (first >= end) | (first < begin):  # the latter where the rows in front are other ranks' experts'
            return
    expert = which.to(tl.int64)
    m = (first + tl.arange(0, C.ROWS)).to(tl.int64)
    n = tl.program_id(1) * C.COLUMNS + tl.arange(0, C.COLUMNS)
    there, columns_inside = m < end, n < C.N
    line = expert * C.N + n.to(tl.int64)  # [COLUMNS], in [E, N]
    if C.CHAIN and not C.PART:
        if C.SWAP:
            total = tl.zeros([C.COLUMNS, C.ROWS], tl.float32)
        else:
            total = tl.zeros([C.ROWS, C.COLUMNS], tl.float32)
        for from_k in range(0, C.K, C.CHAIN):
            to_k = tl.minimum(from_k + C.CHAIN, C.K)
            total += _sum_along(x, weight, scales, offsets, m, end, n, expert, from_k, to_k, C)
    else:
        begin_k = 0
        end_k = C.K
        if C.PART:
            begin_k = tl.program_id(2) * C.PART
            end_k = tl.minimum(begin_k + C.PART, C.K)
        total = _sum_along(x, weight, scales, offsets, m, end, n, expert, begin_k, end_k, C)
    if LAST:
        scale = tl.load(scales + line, mask=columns_inside, other=0.0).to(tl.float32)
        total *= scale[:, None] if C.SWAP else scale[None, :]
    if C.SWAP:
        total = tl.trans(total)
    if C.PART:
        place = (tl.program_id(2) * rows + m[:, None]) * C.N + n.to(tl.int64)[None, :]
        tl.store(out + place, total, mask=there[:, None] & columns_inside[None, :])
        return
    if C.BIAS:
        total += tl.load(bias + line, mask=columns_inside, other=0.0).to(tl.float32)[None, :]
    total = activated(total, C.ACTIVATION)
    to = out + m[:, None] * C.OUT_STRIDE + n.to(tl.int64)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & columns_inside[None, :])


@triton.jit(do_not_specialize=["rows", "parts"])
def sum_parts_kernel(
    sums: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    parts: tl.tensor,
    out: tl.tensor,
    N: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Computes ACTIVATION(the sum of sums float32 [parts, M, N] + bias [N]) -> out [M, N]. The parts are added in
    order.

    Grid (M, pieces of WIDTH columns); ``rows`` is M.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = n < N
    total = tl.zeros([WIDTH], tl.float32)
    for part in range(0, parts):
        total += tl.load(sums + (part * rows + row) * N + n, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    total = activated(total, ACTIVATION)
    tl.store(out + row * OUT_STRIDE + n, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def unpack_kernel(
    weight: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BY_GROUP: tl.constexpr,
) -> None:
    """Dequantizes a weight [N, K] -> out [N, K], rounded to its type.

    Grid (tiles of ROWS rows, tiles of WIDTH columns). The other names are those of ``ProductConstants``.
    """
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP else 1
    line = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    within = (line < N)[:, None] & (k < K)[None, :]
    group = k // GROUP if GROUP else k * 0
    at = group[None, :] * BY_GROUP + line[:, None] if BY_GROUP else line[:, None] * GROUPS + group[None, :]
    if FORMAT == "int4" or FORMAT == "uint4":
        half = tl.program_id(1) * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
        there = (line < N)[:, None] & (half < K // 2)[None, :]
        if BY_GROUP:
            row = (half // (GROUP // 2))[None, :] * BY_GROUP + line[:, None]
            at_codes = weight + row * (GROUP // 2) + (half % (GROUP // 2))[None, :]
        else:
            at_codes = weight + line[:, None] * (K // 2) + half[None, :]
        codes = tl.load(at_codes, mask=there, other=0)
        values = tl.reshape(nibbles_to_floats(codes, FORMAT, tl.float32), [ROWS, WIDTH])
    else:
        at_codes = weight + (at * GROUP + (k % GROUP)[None, :] if BY_GROUP else line[:, None] * K + k[None, :])
        values = stored_to_float(tl.load(at_codes, mask=within, other=0.0), FORMAT)
    values *= tl.load(scales + at, mask=within, other=0.0).to(tl.float32)
    if OFFSETS:
        values += tl.load(offsets + at, mask=within, other=0.0).to(tl.float32)
    tl.store(out + line[:, None] * K + k[None, :], values.to(out.dtype.element_ty), mask=within)
