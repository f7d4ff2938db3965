from __future__ import annotations

import pytest
import torch

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
