"""The Triton product with weights as they are stored: 8-bit and 4-bit integers, 8-bit floats, experts' in any type.

x [M, K] @ weight [N, K]^T. What a weight holds is exact in 16-bit floats, and scales are applied to float32 sums of one
group, offsets to the sums of x: so no weight is rounded to another float. (Where a group isn't a multiple of a step
along K, its weights are rounded to the type of x.)

With many rows a library multiplies faster than this kernel: for it ``unpack_kernel`` makes floats of a weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_kernels import request_of_tile
from .step_kernels import activated, stored_to_float


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
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PART: tl.constexpr = 0,
    SWAP: tl.constexpr = False,
) -> None:
    """ACTIVATION(x [M, K] @ weight [N, K]^T + bias [N]) -> out [M, N].

    Grid (tiles of ROWS rows, tiles of COLUMNS columns); ``rows`` is M. If GROUPED, row m takes the weight, scales and
    bias of expert e where starts[e] <= m < starts[e + 1], and there are M // ROWS + experts tiles of rows.

    ``FORMAT``: "float", "int8", "fp8" (a pointer of that type), "e4m3" (bytes), "int4" or "uint4" (two values a byte,
    the first in its low half). GROUP: neighbours along K that share a scale, and an offset if OFFSETS; 0: all of K.

    With PART, a multiple of DEPTH, each program sums PART neighbours along K, those of its number along z, and ``out``
    float32 [parts, M, N] takes the sums without bias and activation: ``sum_parts_kernel`` makes the result.

    With SWAP out^T = weight @ x^T is computed: then Hopper's tensor cores take weights from registers.
    """
    NIBBLES: tl.constexpr = FORMAT == "int4" or FORMAT == "uint4"
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP else 1
    WHOLE: tl.constexpr = FORMAT != "float" and GROUP % DEPTH == 0  # a step along K lies in one group
    tile = tl.program_id(0)
    first = tile * ROWS
    end = rows
    which = tile * 0
    if GROUPED:
        which = request_of_tile(starts, tile, experts, ROWS)  # tiles of experts lie as those of requests do
        begin = tl.load(starts + which)
        end = tl.load(starts + which + 1)
        first = begin + (tile - (begin // ROWS + which)) * ROWS
        if (first >= end) | (first < begin):  # the latter where the rows in front are other ranks' experts'
            return
    expert = which.to(tl.int64)
    m = (first + tl.arange(0, ROWS)).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    there, wanted = m < end, n < N
    line = expert * N + n.to(tl.int64)  # [COLUMNS], in [E, N]
    if SWAP:
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
    from_k = 0
    to_k = K
    if PART:
        from_k = tl.program_id(2) * PART
        to_k = tl.minimum(from_k + PART, K)
    for start in range(from_k, to_k, DEPTH):
        inside = start + k < K
        left = tl.load(
            x + m[:, None] * X_STRIDE + (start + k)[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )  # [ROWS, DEPTH]
        if NIBBLES:
            half = tl.arange(0, DEPTH // 2)
            codes = tl.load(
                weight + line[:, None] * (K // 2) + (start // 2 + half)[None, :],
                mask=wanted[:, None] & (start // 2 + half < K // 2)[None, :],
                other=0,
            ).to(tl.int32)  # [COLUMNS, DEPTH // 2]
            low, high = codes & 15, (codes >> 4) & 15
            if FORMAT == "int4":
                low, high = (low ^ 8) - 8, (high ^ 8) - 8
            right = tl.reshape(tl.join(low, high), [COLUMNS, DEPTH]).to(tl.float32)
        else:
            codes = tl.load(
                weight + line[:, None] * K + (start + k)[None, :],
                mask=wanted[:, None] & inside[None, :],
                other=0.0,
            )  # [COLUMNS, DEPTH]
            right = codes if FORMAT == "float" else stored_to_float(codes, FORMAT)
        if FORMAT != "float" and not WHOLE:
            at = line[:, None] * GROUPS + ((start + k) // GROUP)[None, :]
            within = wanted[:, None] & inside[None, :]
            right = right.to(tl.float32) * tl.load(scales + at, mask=within, other=0.0).to(tl.float32)
            if OFFSETS:
                right += tl.load(offsets + at, mask=within, other=0.0).to(tl.float32)
        if SWAP:
            product = tl.dot(right.to(left.dtype), tl.trans(left), input_precision="ieee")  # [COLUMNS, ROWS]
        else:
            product = tl.dot(left, tl.trans(right.to(left.dtype)), input_precision="ieee")  # [ROWS, COLUMNS]
        if not WHOLE:
            total += product
        else:
            group = start // GROUP if GROUP else 0
            scale = tl.load(scales + line * GROUPS + group, mask=wanted, other=0.0).to(tl.float32)
            total += product * (scale[:, None] if SWAP else scale[None, :])
            if OFFSETS:
                shift = tl.load(offsets + line * GROUPS + group, mask=wanted, other=0.0).to(tl.float32)
                sums = tl.sum(left.to(tl.float32), axis=1)
                total += (shift[:, None] * sums[None, :]) if SWAP else (sums[:, None] * shift[None, :])
    if SWAP:
        total = tl.trans(total)
    if PART:
        place = (tl.program_id(2) * rows + m[:, None]) * N + n.to(tl.int64)[None, :]
        tl.store(out + place, total, mask=there[:, None] & wanted[None, :])
        return
    if BIAS:
        total += tl.load(bias + line, mask=wanted, other=0.0).to(tl.float32)[None, :]
    total = activated(total, ACTIVATION)
    to = out + m[:, None] * OUT_STRIDE + n.to(tl.int64)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & wanted[None, :])


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
    """ACTIVATION(the sum of sums float32 [parts, M, N] + bias [N]) -> out [M, N]; always added in the order of parts.

    Grid (M, pieces of WIDTH columns); ``rows`` is M.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    wanted = n < N
    total = tl.zeros([WIDTH], tl.float32)
    for part in range(0, parts):
        total += tl.load(sums + (part * rows + row) * N + n, mask=wanted, other=0.0)
    if BIAS:
        total += tl.load(bias + n, mask=wanted, other=0.0).to(tl.float32)
    total = activated(total, ACTIVATION)
    tl.store(out + row * OUT_STRIDE + n, total.to(out.dtype.element_ty), mask=wanted)


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
) -> None:
    """What a weight [N, K] stands for -> out [N, K], rounded to its type.

    Grid (tiles of ROWS rows, tiles of WIDTH columns). The other names are those of ``product_kernel``.
    """
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP else 1
    line = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    within = (line < N)[:, None] & (k < K)[None, :]
    if FORMAT == "int4" or FORMAT == "uint4":
        half = tl.program_id(1) * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
        there = (line < N)[:, None] & (half < K // 2)[None, :]
        codes = tl.load(weight + line[:, None] * (K // 2) + half[None, :], mask=there, other=0).to(tl.int32)
        low, high = codes & 15, (codes >> 4) & 15
        if FORMAT == "int4":
            low, high = (low ^ 8) - 8, (high ^ 8) - 8
        values = tl.reshape(tl.join(low, high), [ROWS, WIDTH]).to(tl.float32)
    else:
        codes = tl.load(weight + line[:, None] * K + k[None, :], mask=within, other=0.0)
        values = stored_to_float(codes, FORMAT)
    group = k // GROUP if GROUP else k * 0
    at = line[:, None] * GROUPS + group[None, :]
    values *= tl.load(scales + at, mask=within, other=0.0).to(tl.float32)
    if OFFSETS:
        values += tl.load(offsets + at, mask=within, other=0.0).to(tl.float32)
    tl.store(out + line[:, None] * K + k[None, :], values.to(out.dtype.element_ty), mask=within)
