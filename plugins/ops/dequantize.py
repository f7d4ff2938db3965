"""``ew.dequantize``: a weight of 8-bit floats as the 32-bit floats that it stands for.

The 8-bit floats are e4m3fn of OCP's OFP8 specification (https://www.opencompute.org/documents/ocp-8-bit-floating-point-
specification-ofp8-revision-1-0-2023-12-01-pdf-1): 4 bits of exponent, 3 of mantissa, up to 448, no infinity.
"""

from __future__ import annotations

import torch

from .library import register
from .quantization import groups_of

LARGEST_E4M3 = 448.0
"""The largest finite value of e4m3fn."""


def dequantize(values: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """values e4m3fn [.., N, K] times scales float16 [.., N, G] -> float32 [.., N, K].

    G groups of ``group_size`` neighbours along K, the last one shorter where they don't divide it; 0: all of K is one.
    Every product is exact: 4 bits times 11.
    """
    size = values.shape[-1]
    spread = scales.float().repeat_interleave(group_size or size, dim=-1)[..., :size]
    return (values.float() * spread).contiguous()


def _fake(values: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    torch._check(
        values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float16,
        lambda: f"ew.dequantize: values {values.dtype}, scales {scales.dtype}",
    )
    shape = (*values.shape[:-1], groups_of(int(values.shape[-1]), group_size))
    torch._check(
        tuple(scales.shape) == shape,
        lambda: f"ew.dequantize: scales {scales.shape} for values {values.shape} in groups of {group_size}",
    )
    return scales.new_empty(values.shape, dtype=torch.float32)


register(
    "dequantize(Tensor values, Tensor scales, int group_size) -> Tensor",
    reference=dequantize,
    fake=_fake,
)
