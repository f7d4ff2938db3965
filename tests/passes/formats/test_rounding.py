"""Both halves of the table of weight formats, and what rounding to codes gives."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

from enginewright.passes.formats.rounding import ROUNDINGS, TORCH_DTYPES
from enginewright.passes.ir.prequantized import CodeFormat, Codes, decode
from enginewright.runtime.bundle.weights import pack_blocks, unpack_blocks
from enginewright.runtime.shared.dtypes import DTYPES, Dtype
from enginewright.runtime.shared.weight_formats import FORMATS, NF4, Storage


def test_both_halves_have_every_format_and_the_types_their_bits() -> None:
    assert tuple(FORMATS) == tuple(ROUNDINGS) == get_args(Storage)
    assert set(get_args(Dtype)) <= DTYPES.keys()
    for name, of in DTYPES.items():
        assert TORCH_DTYPES[name].itemsize == of.numpy.itemsize == max(1, of.bits // 8)


@pytest.mark.parametrize(("rows", "size"), [(3, 64), (5, 200)])
def test_codes_are_the_nearest_and_numpy_reads_what_torch_means(rows: int, size: int) -> None:
    torch.manual_seed(size)
    weight = torch.randn(rows, size) * torch.logspace(-2, 1, rows)[:, None]
    weight[0, :64] = 0
    codes = ROUNDINGS["nf4"].round(weight, 64, False)
    assert codes.offsets is None and (codes.saturated, codes.vanished) == (0, 0)
    numbers = np.float32(NF4)
    for n in range(rows):
        for k in range(size):
            first = k // 64 * 64
            scale = weight[n, first : first + 64].abs().max().half().float().item()
            assert codes.scales[n, k // 64] == scale
            nearest = np.abs(numbers * np.float32(scale) - weight[n, k].item()).min()
            off = abs(numbers[codes.values[n, k]] * np.float32(scale) - weight[n, k].item())
            assert off == pytest.approx(nearest, rel=1e-5, abs=1e-7)
    stands_for = decode(Codes(codes.values, codes.scales), CodeFormat(4, 64, kind="nf4"))
    blocks = pack_blocks(codes.values.numpy(), codes.scales.numpy(), "nf4")
    assert blocks.shape == (rows, -(-size // 64), 34)
    np.testing.assert_array_equal(unpack_blocks(blocks, (rows, size), "nf4"), stands_for.numpy())


def test_a_group_of_tiny_weights_vanishes_and_a_type_has_no_codes() -> None:
    assert ROUNDINGS["nf4"].round(torch.full((1, 64), 1e-9), 64, False).vanished == 1
    with pytest.raises(NotImplementedError):
        ROUNDINGS["bf16"].round(torch.ones(1, 64), 0, False)
