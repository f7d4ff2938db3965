"""``ew.dequantize``: converts a weight of 8-bit floats or of integers to 32-bit floats.

The 8-bit floats are e4m3fn of OCP's OFP8 specification (https://www.opencompute.org/documents/ocp-8-bit-floating-point-
specification-ofp8-revision-1-0-2023-12-01-pdf-1): 4 bits of exponent, 3 of mantissa, up to 448, no infinity. Integers
are those of ``ew.quantized_linear``.
"""

from __future__ import annotations

import torch

from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.weight_formats import FORMATS

from .library import register
from .quantization import check_weight, groups_of

LARGEST_E4M3 = 448.0
"""The largest finite value of e4m3fn."""

_FLOATS = frozenset(getattr(torch, DTYPES[of.dtype].torch) for of in FORMATS.values() if of.scaled_floats and of.layout)


def dequantize(
    values: torch.Tensor, scales: torch.Tensor, group_size: int, offsets: torch.Tensor | None = None, bits: int = 8
) -> torch.Tensor:
    """Computes values * scales, plus offsets if any: values e4m3fn or int8 [.., N, K], scales float16 [.., N, G] ->
    float32 [.., N, K].

    A group is ``group_size`` neighbours along K, and the last one may be shorter; 0 makes all of K one group. ``bits``
    says
    which integers the values are: 4 or 8. Every product is exact, because the factors have at most 8 and 11 bits.
    """
    size = values.shape[-1]

    def spread(factors: torch.Tensor) -> torch.Tensor:
        return factors.float().repeat_interleave(group_size or size, dim=-1)[..., :size]

    value = values.float() * spread(scales)
    return (value if offsets is None else value + spread(offsets)).contiguous()


def _fake(
    values: torch.Tensor, scales: torch.Tensor, group_size: int, offsets: torch.Tensor | None, bits: int
) -> torch.Tensor:
    if values.dtype == torch.int8:
        check_weight("dequantize", values, scales, offsets, bits, group_size)
        return scales.new_empty(values.shape, dtype=torch.float32)
    torch._check(
        values.dtype in _FLOATS and scales.dtype == torch.float16 and offsets is None and bits == 8,
        lambda: f"ew.dequantize: values {values.dtype}, scales {scales.dtype}",
    )
    shape = (*values.shape[:-1], groups_of(int(values.shape[-1]), group_size))
    torch._check(
        tuple(scales.shape) == shape,
        lambda: f"ew.dequantize: scales {scales.shape} for values {values.shape} in groups of {group_size}",
    )
    return scales.new_empty(values.shape, dtype=torch.float32)


register(dequantize, fake=_fake)
