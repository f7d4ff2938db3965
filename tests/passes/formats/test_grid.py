"""Scales that count what a column is multiplied with, of every format of integers below 8 bits, also in blocks."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.formats.grid import Grid
from enginewright.passes.ir.prequantized import CodeFormat, Codes, decode
from enginewright.passes.ir.quantized import round_rows
from enginewright.passes.ops.quantization import groups_of, scales_as_floats
from enginewright.passes.quantization.gptq import choose_scales, gptq
from enginewright.runtime.shared.weight_formats import FORMATS

KINDS = [
    CodeFormat(4, 32, offsets=True, scale_block=8),  # Q4_K
    CodeFormat(4, 16, scale_block=16),  # Q3_K
    CodeFormat(5, 32, offsets=True, scale_block=8),  # Q5_K
    CodeFormat(6, 16, scale_block=16),  # Q6_K
    CodeFormat(4, 32, kind="iq4", scale_block=8),  # IQ4_XS
    CodeFormat(4, 32, kind="fp4"),  # MXFP4
    CodeFormat(4, 16, kind="fp4", scale_block=16),  # NVFP4
]


def given(rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [N, K] with some far values, and inputs [T, K] whose columns hang together and differ in size."""
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(rows, size, generator=generator) ** 3 / 4
    mixed = torch.eye(size) + torch.randn(size, size, generator=generator) / size**0.5
    x = torch.randn(2 * size, size, generator=generator) @ mixed
    x[:, ::7] *= 6
    return weight, x


@pytest.mark.parametrize("code_format", KINDS, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(12, 256), (7, 512)])
def test_values_are_the_nearest_and_what_counts_is_closer(code_format: CodeFormat, rows: int, size: int) -> None:
    weight, x = given(rows, size)
    importance = x.square().mean(0)
    scales, offsets = choose_scales(weight, importance, code_format)
    groups = groups_of(size, code_format.group_size)
    exact = scales_as_floats(scales, groups)[..., None]
    shift = torch.zeros_like(exact) if offsets is None else scales_as_floats(offsets, groups)[..., None]
    grid = Grid.of(code_format.storage, offsets=code_format.offsets)
    grouped = weight.unflatten(-1, (groups, -1))
    values = grid.quantized(grouped, exact, shift)
    every = torch.tensor([float(n) for n in grid.levels or range(grid.low, grid.high + 1)])
    off = ((every * exact[..., None] + shift[..., None]) - grouped[..., None]).abs().amin(-1)
    # The same up to rounding: where two integers are as near, either may be taken.
    torch.testing.assert_close((values * exact + shift - grouped).abs(), off, rtol=1e-4, atol=1e-5)

    codes = Codes(values.flatten(-2).to(torch.int8), scales, offsets)
    plain = round_rows(weight, code_format)
    errors = [
        float((importance * (decode(c, code_format) - weight).square()).sum())
        for c in (codes, Codes(plain.values, plain.scales, plain.offsets))
    ]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("code_format", KINDS, ids=str)
def test_gptq_takes_what_outputs_are_off_below_that(code_format: CodeFormat) -> None:
    weight, x = given(24, 256)
    codes = gptq(weight, x.t() @ x, code_format)
    plain = round_rows(weight, code_format)
    errors = [
        float((x @ (decode(c, code_format) - weight).t()).norm())
        for c in (codes, Codes(plain.values, plain.scales, plain.offsets))
    ]
    assert errors[0] < 0.75 * errors[1]
    levels = FORMATS[code_format.storage].levels
    assert not levels or set(codes.values.unique().tolist()) <= set(levels)


def test_a_group_of_zeros_stays_one() -> None:
    weight, x = given(3, 256)
    weight[1] = 0
    codes = gptq(weight, x.t() @ x, KINDS[0])
    assert not decode(codes, KINDS[0])[1].any()
