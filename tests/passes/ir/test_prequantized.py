from __future__ import annotations

import pytest
import torch

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.ir.prequantized import CodeFormat, Codes, decode


@pytest.mark.parametrize(("rows", "size", "group"), [(2, 6, 3), (5, 64, 32), (3, 40, 32), (4, 10, 0)])
def test_a_weight_is_value_times_scale_plus_offset(rows: int, size: int, group: int) -> None:
    torch.manual_seed(0)
    groups = -(-size // group) if group else 1
    values = torch.randint(0, 16, (rows, size)).to(torch.int8)
    scales, offsets = torch.rand(rows, groups).half(), torch.randn(rows, groups).half()
    symmetric = decode(Codes(values, scales), CodeFormat(4, group))
    shifted = decode(Codes(values, scales, offsets), CodeFormat(4, group, offsets=True))
    for n in range(rows):
        for k in range(size):
            g = k // group if group else 0
            product = values[n, k].float() * scales[n, g].float()
            assert symmetric[n, k] == product
            assert shifted[n, k] == product + offsets[n, g].float()


def test_the_codes_of_a_weight_format() -> None:
    four = CodeFormat.of(
        WeightFormat(storage="int4", group_size=32, zero_point=True, activation="int8", activation_group_size=32)
    )
    assert four == CodeFormat(4, 32, offsets=True)
    eight, floats = (
        CodeFormat.of(WeightFormat(storage="int8", group_size=64, activation="int8")),
        CodeFormat.of(WeightFormat(storage="fp8", group_size=32)),
    )
    assert eight is not None and floats is not None
    assert eight == CodeFormat(8, 64) and floats == CodeFormat(8, 32, kind="fp8")
    assert (eight.dtype, floats.dtype) == (torch.int8, torch.float8_e4m3fn)
    assert (eight.storage, floats.storage) == ("int8", "fp8") and not eight.offsets
    assert CodeFormat.of(WeightFormat()) is None is CodeFormat.of(WeightFormat(storage="bf16", activation="bf16"))
