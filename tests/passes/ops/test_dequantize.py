from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from enginewright.passes.ops.dequantize import dequantize

ew = torch.ops.ew


@pytest.mark.parametrize(("shape", "group"), [((3, 40), 0), ((5, 64), 32), ((33, 72), 32), ((2, 7, 96), 64)])
def test_every_product_is_exact(shape: tuple[int, ...], group: int) -> None:
    torch.manual_seed(0)
    width = group or shape[-1]
    values = (torch.randn(shape) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(*shape[:-1], -(-shape[-1] // width)).half() * 2.0**-10  # some are subnormal
    values_back = dequantize(values, scales, group)
    assert (values_back.dtype, tuple(values_back.shape)) == (torch.float32, shape)
    # As another implementation of the 8-bit floats reads them, in 64 bits.
    wide = values.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for k in range(shape[-1]):
        expected = wide[..., k] * scales[..., k // width].double().numpy()
        np.testing.assert_array_equal(values_back[..., k].double().numpy(), expected)


def test_all_256_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values_back = dequantize(codes.view(torch.float8_e4m3fn).view(1, 256), torch.ones(1, 1).half(), 0)[0]
    expected = codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(values_back.numpy(), expected)
    assert float(values_back[~values_back.isnan()].max()) == 448.0


@pytest.mark.parametrize(
    ("values", "scales", "group", "message"),
    [
        (torch.zeros(2, 64, dtype=torch.int16), torch.ones(2, 2).half(), 32, "values torch.int16"),
        (torch.zeros(2, 64, dtype=torch.float8_e4m3fn), torch.ones(2, 2), 32, "scales torch.float32"),
        (torch.zeros(2, 64, dtype=torch.float8_e4m3fn), torch.ones(2, 2).half(), 0, r"scales .*\[2, 2\].* groups of 0"),
        (torch.zeros(2, 65, dtype=torch.float8_e4m3fn), torch.ones(2, 2).half(), 32, r"scales .*\[2, 2\]"),
    ],
)
def test_what_is_turned_down(values: torch.Tensor, scales: torch.Tensor, group: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ew.dequantize(values.to("meta"), scales.to("meta"), group)
