"""Products of 8-bit integers: how activations are quantized, and what linears and embeddings of quantized weights give.

Everything is symmetric: a value is an integer in -127 .. 127 times the scale of its group, which is ``group_size``
neighbours along the last dimension, the last group being shorter where they don't divide it; 0 makes all of it one
group. Weights have float16 scales and activations float32 ones. The order of sums is docs/numerics.md's.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from .library import register

LARGEST = 127
"""Of a quantized value; -128 is not used, so that a sign never changes a magnitude."""

_EXACT_IN_FLOAT = 1 << 24
"""Integers up to here have a float32 of their own."""


def groups_of(size: int, group_size: int) -> int:
    """How many groups ``size`` values have."""
    return -(-size // group_size) if group_size else 1


def quantize_activation(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [.., K] float32 -> values int8 [.., K], scales float32 [.., groups], sums int32 [.., groups].

    scale = max |x| / 127 and value = x * (127 / max |x|) to the nearest integer, ties to even, all in float32. A group
    of zeros has scale 0, and so has one so small that 127 / max |x| is infinite; a group with a NaN or an infinity has
    scale NaN and values 0. ``sums`` are the groups' sums of values, which kernels for unsigned weights need.
    """
    size = x.shape[-1]
    groups = groups_of(size, group_size)
    width = group_size or size
    padded = torch.nn.functional.pad(x.float(), (0, groups * width - size)).unflatten(-1, (groups, width))
    largest = padded.abs().amax(-1)  # [.., groups]; NaN if one is
    inverse = LARGEST / largest
    usable = torch.isfinite(largest) & torch.isfinite(inverse)
    values = torch.where(usable[..., None], (padded * inverse[..., None]).round(), 0.0).to(torch.int8)
    scales = torch.where(usable, largest / LARGEST, 0.0)
    scales = torch.where(torch.isfinite(largest), scales, torch.nan)
    sums = values.sum(-1, dtype=torch.int32)
    return values.flatten(-2)[..., :size].contiguous(), scales.contiguous(), sums.contiguous()


def quantized_linear(
    values: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    weight_group: int,
    activation_group: int,
) -> torch.Tensor:
    """The product of what ``quantize_activation`` gives with a quantized weight, in float32.

    Args:
        values, scales, sums: int8 [.., K], float32 [.., Ga], int32 [.., Ga]; in groups of ``activation_group``.
        weight, weight_scales: int8 [N, K] and float16 [N, Gw]; in groups of ``weight_group``.
        bias: float32 [N] or None.

    Returns:
        [.., N]. Where both are grouped the groups are the same.
    """
    lead, size = values.shape[:-1], values.shape[-1]
    width = weight_group or activation_group or size
    x, w = values.flatten(0, -2), weight  # [M, K], [N, K]
    xs, ws = scales.flatten(0, -2), weight_scales.float()  # [M, Ga], [N, Gw]
    total = torch.zeros((len(x), len(w)), dtype=torch.float32)
    for group, start in enumerate(range(0, size, width)):
        part = _integer_product(x[:, start : start + width], w[:, start : start + width])  # [M, N], exact
        factor = torch.ones((), dtype=torch.float32)
        if weight_group or not activation_group:
            factor = factor * ws[None, :, group]
        if activation_group or not weight_group:
            factor = factor * xs[:, group, None]
        # In float64 the product is exact, so that this rounds once, as fma does.
        total = (part.double() * factor.double() + total.double()).float()
    if weight_group and not activation_group:
        total = total * xs
    if activation_group and not weight_group:
        total = total * ws.t()
    if bias is not None:
        total = total + bias
    return total.reshape(*lead, len(w)).contiguous()


def _integer_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """int8 [M, K] and [N, K] -> the exact sums [M, N], as float32 (beyond 2^24 rounded to the nearest)."""
    exact = torch.float32 if x.shape[1] * LARGEST * LARGEST < _EXACT_IN_FLOAT else torch.float64
    return (x.to(exact) @ w.to(exact).t()).float()


def quantized_embedding(ids: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """ids [T], table int8 [V, H], scales float16 [V, groups] -> float32 [T, H]: the rows times their scales."""
    rows = ids.long()
    width = group_size or table.shape[1]
    factors = scales[rows].float().repeat_interleave(width, dim=-1)[..., : table.shape[1]]
    return (table[rows].float() * factors).contiguous()


def quantized_grouped_linear(
    values: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor,
    starts: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    weight_group: int,
    activation_group: int,
) -> torch.Tensor:
    """``quantized_linear`` for E experts: row m takes expert e where starts[e] <= m < starts[e + 1].

    values [M, K] and what belongs to them, starts [E + 1], weight int8 [E, N, K], weight_scales float16 [E, N, Gw],
    bias [E, N] or None -> [M, N].
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
                None if bias is None else bias[e],
                weight_group,
                activation_group,
            )
    return out


def _check_groups(
    op: str,
    values: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    ws: torch.Tensor,
    weight_group: int,
    activation_group: int,
) -> None:
    size = values.shape[-1]
    torch._check(
        values.dtype == weight.dtype == torch.int8 and ws.dtype == torch.float16,
        lambda: f"ew.{op}: values {values.dtype}, weight {weight.dtype}, weight_scales {ws.dtype}",
    )
    torch._check(
        size == weight.shape[-1], lambda: f"ew.{op}: values {values.shape} and weight {weight.shape} differ in K"
    )
    torch._check(
        not (weight_group and activation_group) or weight_group == activation_group,
        lambda: f"ew.{op}: weights in groups of {weight_group}, activations in groups of {activation_group}",
    )
    torch._check(
        tuple(ws.shape) == (*weight.shape[:-1], groups_of(size, weight_group)),
        lambda: f"ew.{op}: weight_scales {ws.shape} for weight {weight.shape} in groups of {weight_group}",
    )
    torch._check(
        scales.shape[-1] == groups_of(size, activation_group),
        lambda: f"ew.{op}: scales {scales.shape} for values {values.shape} in groups of {activation_group}",
    )


def _fake_quantize(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch._check(x.dtype == torch.float32, lambda: f"ew.quantize_activation: x is {x.dtype}")
    torch._check(group_size >= 0, lambda: f"ew.quantize_activation: groups of {group_size}")
    shape = (*x.shape[:-1], groups_of(int(x.shape[-1]), group_size))
    return (
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty(shape),
        x.new_empty(shape, dtype=torch.int32),
    )


def _fake_linear(
    values: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    weight_group: int,
    activation_group: int,
) -> torch.Tensor:
    _check_groups("quantized_linear", values, scales, weight, weight_scales, weight_group, activation_group)
    return scales.new_empty((*values.shape[:-1], weight.shape[0]))


def _fake_embedding(ids: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    torch._check(
        tuple(scales.shape) == (table.shape[0], groups_of(int(table.shape[1]), group_size)),
        lambda: f"ew.quantized_embedding: scales {scales.shape} for table {table.shape} in groups of {group_size}",
    )
    return table.new_empty((*ids.shape, table.shape[1]), dtype=torch.float32)


def _fake_grouped_linear(
    values: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor,
    starts: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    weight_group: int,
    activation_group: int,
) -> torch.Tensor:
    _check_groups("quantized_grouped_linear", values, scales, weight, weight_scales, weight_group, activation_group)
    torch._check(
        starts.shape[0] == weight.shape[0] + 1,
        lambda: f"ew.quantized_grouped_linear: starts {starts.shape} for {weight.shape[0]} experts",
    )
    return scales.new_empty((values.shape[0], weight.shape[1]))


register(
    "quantize_activation(Tensor x, int group_size) -> (Tensor values, Tensor scales, Tensor sums)",
    reference=quantize_activation,
    fake=_fake_quantize,
)
register(
    "quantized_linear(Tensor values, Tensor scales, Tensor sums, Tensor weight, Tensor weight_scales, Tensor? bias, "
    "int weight_group, int activation_group) -> Tensor",
    reference=quantized_linear,
    fake=_fake_linear,
)
register(
    "quantized_embedding(Tensor ids, Tensor table, Tensor scales, int group_size) -> Tensor",
    reference=quantized_embedding,
    fake=_fake_embedding,
)
register(
    "quantized_grouped_linear(Tensor values, Tensor scales, Tensor sums, Tensor starts, Tensor weight, "
    "Tensor weight_scales, Tensor? bias, int weight_group, int activation_group) -> Tensor",
    reference=quantized_grouped_linear,
    fake=_fake_grouped_linear,
)
