from __future__ import annotations

import pytest
import torch

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.ir.prequantized import CodeFormat, Codes
from enginewright.passes.quantization.gptq import factorize
from enginewright.passes.quantization.held_out import (
    ERROR,
    FEWEST_TOKENS,
    HELD_OUT_ERROR,
    HELD_OUT_NEAREST,
    LayerInputs,
    OutputErrors,
    held_out_tokens,
    runs_of,
)


@pytest.mark.parametrize(("tokens", "run"), [(96, 3), (8192, 256)])
def test_every_eighth_run_of_neighbours_is_held_out(tokens: int, run: int) -> None:
    mask = held_out_tokens(tokens)
    assert mask.sum() * 8 == tokens
    assert mask.nonzero()[:, 0].tolist() == [i for i in range(tokens) if i // run % 8 == 7]
    runs = runs_of(mask)
    assert [fitted for fitted, _ in runs] == [True, False] * 4
    assert [i for _, at in runs for i in range(at.start, at.stop)] == list(range(tokens))


def test_few_tokens_are_all_fitted_to() -> None:
    assert not held_out_tokens(FEWEST_TOKENS - 1).any() and held_out_tokens(FEWEST_TOKENS).any()
    assert runs_of(held_out_tokens(5)) == [(True, slice(0, 5))]
    assert runs_of(held_out_tokens(0)) == []


@pytest.mark.parametrize("size", [32, 64])
def test_only_what_is_fitted_to_is_in_the_sum(size: int) -> None:
    rows = torch.randn(640, size, generator=torch.Generator().manual_seed(size))
    inputs = LayerInputs.of(rows, WeightFormat())
    seen = rows[~held_out_tokens(640)]
    # Sums of 560 float32 terms, in another order.
    assert torch.allclose(inputs.hessian.sum, seen.t() @ seen, rtol=0, atol=1e-3)
    assert inputs.hessian.tokens == 560 and torch.equal(inputs.held_out, rows[held_out_tokens(640)])


@pytest.mark.parametrize("off", [1, 2])
def test_what_is_worse_on_held_out_tokens_does_not_count(off: int) -> None:
    """Integers that are off by more than the nearest ones on all tokens; the figures are of those that are used."""
    rows = torch.randn(640, 32, generator=torch.Generator().manual_seed(off))
    inputs = LayerInputs.of(rows, WeightFormat())
    inputs.factor = factorize(inputs.hessian.sum)
    values = torch.arange(-4, 4, dtype=torch.int8).repeat(8, 4)
    scales = torch.full((8, 1), 0.5, dtype=torch.half)
    weight = values * 0.5 + 0.01
    nearest, worse = Codes(values, scales, None), Codes(values + off, scales, None)
    for chosen, keeps in ((worse, False), (nearest, True)):
        errors = OutputErrors()
        assert errors.add(inputs, weight, chosen, nearest, CodeFormat(4, 32)) is keeps
        metrics = {f.name: f.value for f in errors.metrics("here")}
        assert 0 < metrics[HELD_OUT_ERROR] == metrics[HELD_OUT_NEAREST] and 0 < metrics[ERROR] < 0.05
        if not keeps:
            assert errors.of_worse().startswith("a relative error of 0.0")
