"""``ew.quantized_kv_write`` and ``ew.quantized_paged_attention``: a paged cache of 8 bits a value.

A cache is [P, K, Nkv, D], as in ``ew.kv_write``, of either

    int8             -127 .. 127
    float8_e4m3fn    OCP's OFP8 specification (https://www.opencompute.org/documents/ocp-8-bit-floating-point-
                     specification-ofp8-revision-1-0-2023-12-01-pdf-1): up to 448, no infinity

with float32 scales [P, K, Nkv]: one for each token and head, so that later tokens don't change a written one. A value
is its code times that scale, in float32.

``round_to_few_bits`` has the formats of rotated integers, which no op of torch stores.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.kv_formats import KV_FORMATS

from .attention import paged_attention, paged_fake
from .library import register
from .quantization import scale_to

STORED: Mapping[str, torch.dtype] = {
    dtype: getattr(torch, DTYPES[dtype].torch) for dtype, of in KV_FORMATS.items() if of.few_bits is None
}

FEW_BITS: Mapping[str, tuple[int, int]] = {
    dtype: of.few_bits for dtype, of in KV_FORMATS.items() if of.few_bits is not None
}
"""The cache formats of rotated integers -> the bits of a key's and of a value's number."""

NORMAL = (-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127)
"""The 16 integers that 4-bit caches store. They are near the best 16 values for a normal distribution, which rotated
numbers nearly have.
"""

LARGEST_CODE = {STORED[dtype]: of.largest_code for dtype, of in KV_FORMATS.items() if of.largest_code is not None}
"""The element type of a cache -> the code to which the number with the largest magnitude is scaled, for each token and
head.
"""


def quantize_heads(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, Nkv, D] -> codes ``dtype`` [T, Nkv, D], scales float32 [T, Nkv].

    Each head is scaled to the largest code (``scale_to``) and rounded to the nearest, ties to even. Raises KeyError for
    a dtype that isn't a cache's.
    """
    top = LARGEST_CODE[dtype]
    codes, scales = scale_to(x.float(), top)
    codes = codes.clamp(-top, top)
    return (codes if dtype.is_floating_point else codes.round()).to(dtype), scales


def stored_heads(x: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, Nkv, D] -> the contents of a cache of ``dtype``, a ``CacheDtype``: elements [T, Nkv, D], and scales [T,
    Nkv].

    A format without scales has None, and elements that are rounded to the nearest, ties to even.
    """
    stored = STORED[dtype]
    return quantize_heads(x, stored) if stored in LARGEST_CODE else (x.to(stored), None)


def dequantize_heads(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [.., D], scales float32 [..] -> float32 [.., D]."""
    return codes.float() * scales[..., None]


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Multiplies runs of n numbers of x [.., D] by a Hadamard matrix of signs; n is the largest power of two that
    divides D.

    The order of the sums is that of few_bits.h.
    """
    size = x.shape[-1]
    half = (size & -size) // 2
    while half:
        pairs = x.unflatten(-1, (-1, 2, half))
        a, b = pairs.unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        half //= 2
    return x


def quantize_to_few_bits(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, Nkv, D] -> the contents of a cache of ``bits`` bits: integers int8 [T, Nkv, D] and scales float16 [T, Nkv].

    The integers are -127 to 127 for 8 bits, odd ones up to 2^bits - 1 in magnitude for 5 and 6 bits, and those of
    ``NORMAL`` for 4 bits.

    Before that, a head is rotated (``rotate``) in runs of n numbers and multiplied by 2^-h, where h is log2(n) / 2,
    rounded down.
    """
    top = 127.0 if bits in (4, 8) else 2.0**bits - 1
    codes, scales = scale_to(rotate(x.float() * 2.0 ** -_halvings(x)), top)
    if bits == 8:
        integers = codes.round()
    elif bits == 4:
        normal = torch.tensor(NORMAL)
        integers = normal[torch.bucketize(codes, (normal[1:] + normal[:-1]) / 2)]
    else:
        integers = 2 * (codes * 0.5 - 0.5).round() + 1
    return integers.to(torch.int8), scales.half()


def round_to_few_bits(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns x [T, Nkv, D] after a round trip through a cache of ``bits`` bits, in float32."""
    integers, scales = quantize_to_few_bits(x, bits)
    size = x.shape[-1]
    return rotate(integers.float()) * (scales.float() * (2.0 ** _halvings(x) / (size & -size)))[..., None]


def _halvings(x: torch.Tensor) -> int:
    size = x.shape[-1]
    return ((size & -size).bit_length() - 1) // 2


def quantized_kv_write(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scales: torch.Tensor,
    v_scales: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Writes rounded keys and values: k [T, Nkv, D], v [T, Nkv, Dv], slots [T] -> the two caches and their scales
    [P, K, Nkv] after the write.

    Functional: the arguments aren't changed. Raises IndexError for a slot outside the cache.
    """
    new_k, new_k_scales = _write(k_cache, k_scales, k, slots)
    new_v, new_v_scales = _write(v_cache, v_scales, v, slots)
    return new_k, new_v, new_k_scales, new_v_scales


def _write(
    cache: torch.Tensor, scales: torch.Tensor, new: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, new_scales = quantize_heads(new, cache.dtype)
    places = slots.long()
    # As bytes: torch can't index 8-bit floats.
    flat = cache.contiguous().view(torch.uint8).flatten(0, 1)  # [P*K, Nkv, D]
    written = flat.index_copy(0, places, codes.view(torch.uint8)).view(cache.dtype).view(cache.shape)
    return written, scales.contiguous().flatten(0, 1).index_copy(0, places, new_scales).view(scales.shape)


def quantized_paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scales: torch.Tensor,
    v_scales: torch.Tensor,
    block_table: torch.Tensor,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``paged_attention`` over the decoded caches: q [T, Nq, D] -> [T, Nq, Dv]."""
    k, v = dequantize_heads(k_cache, k_scales), dequantize_heads(v_cache, v_scales)
    return paged_attention(q, k, v, block_table, q_start, kv_len, scale, window, softcap, sinks, slopes)


def _write_fake(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k_scales: torch.Tensor, v_scales: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (k_cache, v_cache, k_scales, v_scales))


register(quantized_kv_write, fake=_write_fake)
register(quantized_paged_attention, fake=paged_fake)
