"""Floats of integers against a loop over their definition; what was read stays what it was."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.ir.dequantized import Dequantized
from enginewright.passes.ir.weights import Source


def source(value: torch.Tensor, name: str) -> Source:
    return Source(name, tuple(value.shape), value.dtype, lambda: value)


@pytest.mark.parametrize(("shape", "group"), [((3, 64), 32), ((5, 70), 32), ((2, 4, 48), 0)])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_each_value_is_its_definition(shape: tuple[int, ...], group: int, offsets: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-100, 100, shape, generator=generator).float().to(dtype)
    size = group or shape[-1]
    groups = -(-shape[-1] // size)
    scales = torch.rand((*shape[:-1], groups), generator=generator).half()
    added = torch.randn((*shape[:-1], groups), generator=generator).half()
    before = values.clone()
    expr = Dequantized(
        source(values, "v"), source(scales, "s"), source(added, "o") if offsets else None, group_size=group
    )
    evaluated = expr.evaluate()
    assert (expr.shape, expr.dtype) == (shape, torch.float32) == (tuple(evaluated.shape), evaluated.dtype)
    rows = [t.reshape(-1, t.shape[-1]) for t in (evaluated, values.float(), scales.float(), added.float())]
    for n, row in enumerate(rows[0]):
        for k, value in enumerate(row):
            expected = rows[1][n, k] * rows[2][n, k // size]
            assert value == (expected + rows[3][n, k // size] if offsets else expected)  # the same two roundings
    assert torch.equal(values.float(), before.float())
    assert expr.parts() == expr.values.parts()
