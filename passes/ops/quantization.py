"""Products of integers: how activations are quantized, and what linears and embeddings of quantized weights give.

A value is an integer times the scale of its group. A group is ``group_size`` neighbours along the last dimension, and
the last one may be shorter; 0 makes all of the dimension one group. Activations are 8-bit integers in -127 .. 127 with
float32 scales. Weights have float16 scales, and are int8 tensors of either

    8 bits           -128 .. 127
    4 bits           -8 .. 7, in groups of 16, 32, 64 or 128 that divide K, or of K; and activations in the same groups
    4 with offsets   0 .. 15; a weight is value * scale + offset, with a float16 offset for each group
    5 and 6 bits     -16 .. 15, with offsets 0 .. 31, and -32 .. 31: alike

Scales and offsets may be bytes in blocks of 8 or 16 groups instead: int8 [.., N, blocks * (2 + block)]. A block begins
with the two bytes of a float16. Then comes a signed byte for each group, by which the float16 is multiplied; that is
exact in float32.

docs/inside/numerics.md describes the order of sums.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch

from enginewright.runtime.shared.weight_formats import FORMATS, SCALE_BLOCKS, Storage

from .epilogue import check_epilogue, finish_linear
from .library import register

LARGEST = 127
"""The largest of a value's 8-bit integers here; -128 is not made, so that a sign never changes a magnitude."""

Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The values, scales and sums that ``quantize_activation`` returns."""

_EXACT_IN_FLOAT = 1 << 24
"""Integers up to here have a float32 of their own."""


def groups_of(size: int, group_size: int) -> int:
    """Returns the number of groups of ``size`` values."""
    return -(-size // group_size) if group_size else 1


def scales_in_blocks(scales: torch.Tensor, block: int) -> torch.Tensor:
    """Packs float32 [.., groups] as bytes in blocks of ``block`` groups: int8 [.., groups / block * (2 + block)].

    A block's float16 is its largest magnitude / 127, and infinite where that doesn't fit; bytes are the nearest.
    """
    of_block = scales.float().unflatten(-1, (-1, block))
    halves = (of_block.abs().amax(-1, keepdim=True) / LARGEST).half()
    by = torch.where(halves == 0, torch.inf, halves.float())
    return block_bytes(halves[..., 0], (of_block / by).round().clamp(-LARGEST, LARGEST).to(torch.int8))


def block_bytes(halves: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Packs the float16 ``halves`` [.., blocks] and the int8 ``own`` [.., blocks, block] as scales in blocks.

    Returns int8 [.., blocks * (2 + block)]: for each block its float16, then the bytes of its groups.
    """
    return torch.cat((halves[..., None].contiguous().view(torch.int8), own), -1).flatten(-2)


def scales_as_floats(scales: torch.Tensor, groups: int) -> torch.Tensor:
    """Returns scales, or offsets, as float32 [.., groups], whether they are stored in blocks or not."""
    if scales.dtype != torch.int8:
        return scales.float()
    of_block = scales.unflatten(-1, ((scales.shape[-1] - groups) // 2, -1))
    halves = of_block[..., :2].contiguous().view(torch.float16).float()
    return torch.mul(halves, of_block[..., 2:].float()).flatten(-2)


def scale_to(x: torch.Tensor, largest_code: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x float32 [.., n] -> codes [.., n], not rounded yet, and scales [..], one for each n values.

    scale = max |x| / largest_code and code = x * (largest_code / max |x|), all in float32. Where all is zero, or so
    small that the factor is infinite, scale and codes are 0; with a NaN or an infinity scale is NaN and codes are 0.
    """
    largest = x.abs().amax(-1)  # [..]; NaN if one is
    inverse = largest_code / largest
    usable = torch.isfinite(largest) & torch.isfinite(inverse)
    codes = torch.where(usable[..., None], x * inverse[..., None], 0.0)
    scales = torch.where(usable, largest / largest_code, 0.0)
    return codes, torch.where(torch.isfinite(largest), scales, torch.nan)


def quantize_activation(x: torch.Tensor, group_size: int) -> Quantized:
    """Rounds to int8: x [.., K] float32 -> values int8 [.., K], scales float32 [.., groups], sums of values int32
    [.., groups].

    Each group is scaled to 127 (``scale_to``) and its values go to the nearest integer, ties to even. Kernels for
    unsigned weights need the sums.
    """
    size = x.shape[-1]
    groups = groups_of(size, group_size)
    width = group_size or size
    padded = torch.nn.functional.pad(x.float(), (0, groups * width - size)).unflatten(-1, (groups, width))
    codes, scales = scale_to(padded, LARGEST)  # [.., groups, width], [.., groups]
    values = codes.round().to(torch.int8)
    sums = values.sum(-1, dtype=torch.int32)
    return values.flatten(-2)[..., :size].contiguous(), scales.contiguous(), sums.contiguous()


def quantized_linear(
    values: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    weight_offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight_bits: int,
    weight_group: int,
    activation_group: int,
    activation: str = "",
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiplies the result of ``quantize_activation`` by a quantized weight. The result is float32.

    Args:
        values, scales, sums: int8 [.., K], float32 [.., Ga], int32 [.., Ga]; in groups of ``activation_group``.
        weight, weight_scales: int8 [N, K] and float16 [N, Gw], or bytes in blocks; in groups of ``weight_group``.
        weight_offsets: offsets in the shape of weight_scales, or None; only for 2 to 5 bits.
        bias: float32 [N] or None.
        weight_bits: 2 to 6, or 8; which integers ``weight`` holds.
        activation, residual: see ``ew.linear``.

    Returns:
        [.., N]. Where both are grouped the groups are the same.
    """
    lead, size = values.shape[:-1], values.shape[-1]
    width = weight_group or activation_group or size
    x, w = values.flatten(0, -2), weight  # [M, K], [N, K]
    groups = groups_of(size, weight_group)
    xs, ws = scales.flatten(0, -2), scales_as_floats(weight_scales, groups)  # [M, Ga], [N, Gw]
    wo = None if weight_offsets is None else scales_as_floats(weight_offsets, groups)  # [N, Gw]
    total = torch.zeros((len(x), len(w)), dtype=torch.float32)
    for group, start in enumerate(range(0, size, width)):
        part = _integer_product(x[:, start : start + width], w[:, start : start + width])  # [M, N], exact
        factor = torch.ones((), dtype=torch.float32)
        if weight_group or not activation_group:
            factor = factor * ws[None, :, group]
        if activation_group or not weight_group:
            factor = factor * xs[:, group, None]
        total = _fma(part, factor, total)
        if wo is not None:
            total = _fma(sums.flatten(0, -2)[:, group, None].float() * xs[:, group, None], wo[None, :, group], total)
    if weight_group and not activation_group:
        total = total * xs
    if activation_group and not weight_group:
        total = total * ws.t()
    if bias is not None:
        total = total + bias
    return finish_linear(total.reshape(*lead, len(w)), activation, residual).contiguous()


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Returns a * b + c of float32. The product is exact in float64; the sum is rounded there, and then to float32."""
    return (a.double() * b.double() + c.double()).float()


def _integer_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """int8 [M, K] and [N, K] -> the exact sums [M, N], as float32 (beyond 2^24 rounded to the nearest)."""
    exact = torch.float32 if x.shape[1] * 128 * 128 < _EXACT_IN_FLOAT else torch.float64
    return (x.to(exact) @ w.to(exact).t()).float()


def quantized_embedding(
    ids: torch.Tensor,
    table: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bits: int,
    group_size: int,
) -> torch.Tensor:
    """Looks up rows of a quantized table: ids [T], table int8 [V, H], scales and offsets [V, groups] -> float32 [T, H].

    Scales and offsets are float16, or both are bytes in blocks.
    The rows are multiplied by their scales, and then offsets are added if there are any. The products are exact in
    float32, except for 8 bits with scales in blocks.
    """
    rows, size = ids.long(), table.shape[1]
    groups = groups_of(size, group_size)

    def spread(factors: torch.Tensor) -> torch.Tensor:
        return scales_as_floats(factors[rows], groups).repeat_interleave(group_size or size, dim=-1)[..., :size]

    value = table[rows].float() * spread(scales)
    return (value if offsets is None else value + spread(offsets)).contiguous()


def quantized_grouped_linear(
    values: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor,
    starts: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    weight_offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight_bits: int,
    weight_group: int,
    activation_group: int,
    activation: str = "",
) -> torch.Tensor:
    """Multiplies row m by the quantized weight of the expert e for which starts[e] <= m < starts[e + 1].

    values [M, K] and what belongs to them, starts [E + 1], weight int8 [E, N, K], weight_scales and weight_offsets
    float16 [E, N, Gw], bias [E, N] or None -> [M, N]. The activation as ``ew.linear`` has it.
    """
    bounds = starts.tolist()
    out = torch.zeros((values.shape[0], weight.shape[1]), dtype=torch.float32)
    for e, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            rows = slice(start, stop)
            out[rows] = quantized_linear(
                values[rows],
                scales[rows],
                sums[rows],
                weight[e],
                weight_scales[e],
                None if weight_offsets is None else weight_offsets[e],
                None if bias is None else bias[e],
                weight_bits,
                weight_group,
                activation_group,
            )
    return finish_linear(out, activation)


def storage_of(bits: int) -> Storage:
    """Returns the weight format of integers of this many bits."""
    return cast("Storage", f"int{bits}")


def check_weight(
    op: str,
    weight: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bits: int,
    group_size: int,
) -> None:
    """Raises as torch._check does if the shapes or types of an integer weight, its scales and offsets don't match."""
    size = weight.shape[-1]
    groups = groups_of(size, group_size)
    blocks = [groups // block * (2 + block) for block in SCALE_BLOCKS if groups % block == 0]
    lasts = [groups] if scales.dtype == torch.float16 else blocks
    torch._check(
        weight.dtype == torch.int8 and scales.dtype in (torch.float16, torch.int8),
        lambda: f"ew.{op}: weight {weight.dtype}, weight_scales {scales.dtype}",
    )
    torch._check(bits in (2, 3, 4, 5, 6, 8), lambda: f"ew.{op}: weights of {bits} bits")
    torch._check(
        scales.shape[:-1] == weight.shape[:-1] and scales.shape[-1] in lasts,
        lambda: f"ew.{op}: weight_scales {scales.shape} for weight {weight.shape} in groups of {group_size}",
    )
    torch._check(
        FORMATS[storage_of(bits)].fits(size, group_size),
        lambda: f"ew.{op}: weights of {bits} bits, {weight.shape}, in groups of {group_size}",
    )
    if offsets is not None:
        torch._check(
            bits in (2, 3, 4, 5) and offsets.dtype == scales.dtype and offsets.shape == scales.shape,
            lambda: f"ew.{op}: weight_offsets {offsets.dtype} {offsets.shape} for weight {weight.shape} of {bits} bits",
        )


def _check_groups(
    op: str,
    values: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    bits: int,
    weight_group: int,
    activation_group: int,
) -> None:
    size = values.shape[-1]
    torch._check(values.dtype == torch.int8, lambda: f"ew.{op}: values {values.dtype}")
    torch._check(
        size == weight.shape[-1], lambda: f"ew.{op}: values {values.shape} and weight {weight.shape} differ in K"
    )
    both = bits < 8 or (weight_group and activation_group)
    torch._check(
        not both or weight_group == activation_group,
        lambda: f"ew.{op}: weights of {bits} bits in groups of {weight_group}, activations in {activation_group}",
    )
    torch._check(
        scales.shape[-1] == groups_of(size, activation_group),
        lambda: f"ew.{op}: scales {scales.shape} for values {values.shape} in groups of {activation_group}",
    )


def quantized_shapes(x: torch.Tensor, size: int, group_size: int) -> Quantized:
    """Returns empty results of ``quantize_activation``, for a tensor of x's shape with ``size`` values in the last
    dimension.
    """
    torch._check(group_size >= 0, lambda: f"groups of {group_size}")
    shape = (*x.shape[:-1], groups_of(size, group_size))
    return (
        x.new_empty((*x.shape[:-1], size), dtype=torch.int8),
        x.new_empty(shape),
        x.new_empty(shape, dtype=torch.int32),
    )


def _fake_quantize(x: torch.Tensor, group_size: int) -> Quantized:
    torch._check(x.dtype == torch.float32, lambda: f"ew.quantize_activation: x is {x.dtype}")
    return quantized_shapes(x, x.shape[-1], group_size)


def _fake_linear(
    values: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    weight_offsets: torch.Tensor | None,
    weight_bits: int,
    weight_group: int,
    activation_group: int,
    activation: str,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    check_weight("quantized_linear", weight, weight_scales, weight_offsets, weight_bits, weight_group)
    _check_groups("quantized_linear", values, scales, weight, weight_bits, weight_group, activation_group)
    y = scales.new_empty((*values.shape[:-1], weight.shape[0]))
    return check_epilogue("quantized_linear", y, activation, residual)


def _fake_embedding(
    ids: torch.Tensor,
    table: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bits: int,
    group_size: int,
) -> torch.Tensor:
    check_weight("quantized_embedding", table, scales, offsets, bits, group_size)
    return table.new_empty((*ids.shape, table.shape[1]), dtype=torch.float32)


def _fake_grouped_linear(
    values: torch.Tensor,
    scales: torch.Tensor,
    starts: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    weight_offsets: torch.Tensor | None,
    weight_bits: int,
    weight_group: int,
    activation_group: int,
    activation: str,
) -> torch.Tensor:
    op = "quantized_grouped_linear"
    check_weight(op, weight, weight_scales, weight_offsets, weight_bits, weight_group)
    _check_groups(op, values, scales, weight, weight_bits, weight_group, activation_group)
    torch._check(
        starts.shape[0] == weight.shape[0] + 1,
        lambda: f"ew.quantized_grouped_linear: starts {starts.shape} for {weight.shape[0]} experts",
    )
    return check_epilogue(op, scales.new_empty((values.shape[0], weight.shape[1])), activation)


register(quantize_activation, fake=_fake_quantize)
register(quantized_linear, fake=_fake_linear)
register(quantized_embedding, fake=_fake_embedding)
register(quantized_grouped_linear, fake=_fake_grouped_linear)
