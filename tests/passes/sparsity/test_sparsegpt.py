"""SparseGPT on correlated inputs: its form, its error against that of simpler choices, and rounding in its sweep."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.ir.prequantized import CodeFormat, decode
from enginewright.passes.ir.quantized import quantized
from enginewright.passes.ir.two_of_four import best_two, scores_of
from enginewright.passes.ir.weights import Source
from enginewright.passes.sparsity.sparsegpt import factorize_by_fours, sparsegpt, sparsegpt_codes

INT8, PER_ROW, INT4 = CodeFormat(8, 32), CodeFormat(8, 0), CodeFormat(4, 32)


def correlated(rows: int, size: int, tokens: int = 600) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [N, K], and inputs [T, K] of fewer directions than columns, some much larger than others."""
    generator = torch.Generator().manual_seed(rows + size)
    mix = torch.randn((size // 2, size), generator=generator)
    x = torch.randn((tokens, size // 2), generator=generator) @ mix + 0.3 * torch.randn(
        tokens, size, generator=generator
    )
    return torch.randn((rows, size), generator=generator), x * torch.linspace(0.1, 3, size)


def error(x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> float:
    return float((x @ (kept - weight).t()).norm() / (x @ weight.t()).norm())


@pytest.mark.parametrize(("rows", "size"), [(40, 64), (96, 160)])
def test_its_error_is_less_than_wandas_and_that_less_than_magnitudes(rows: int, size: int) -> None:
    weight, x = correlated(rows, size)
    pruned = sparsegpt(weight, factorize_by_fours(x.t() @ x))
    assert (pruned.view(rows, -1, 4) != 0).sum(-1).max() <= 2
    wanda = torch.where(best_two(scores_of(weight, x.norm(dim=0))), weight, 0.0)
    magnitude = torch.where(best_two(weight.abs()), weight, 0.0)
    ours, theirs, plain = (error(x, weight, one) for one in (pruned, wanda, magnitude))
    assert ours < 0.7 * theirs
    assert theirs < plain


@pytest.mark.parametrize(("code_format", "most"), [(INT8, 1.02), (PER_ROW, 1.05), (INT4, 1.3)])
def test_rounding_in_the_sweep_costs_little(code_format: CodeFormat, most: float) -> None:
    weight, x = correlated(64, 96)
    hessian = x.t() @ x
    factor = factorize_by_fours(hessian)
    codes = sparsegpt_codes(weight, hessian, factor, code_format)
    assert (codes.values.view(64, -1, 4) != 0).sum(-1).max() <= 2
    floats = sparsegpt(weight, factor)
    rounded = error(x, weight, decode(codes, code_format))
    assert rounded < most * error(x, weight, floats)
    values, scales, _ = quantized(Source("w", tuple(floats.shape), torch.float32, lambda: floats), code_format)
    behind = decode(type(codes)(values.evaluate(), scales.evaluate()), code_format)
    # Than rounding what was chosen, afterwards; of 8 bits either costs next to nothing.
    assert rounded < (0.97 if code_format == INT4 else 1.05) * error(x, weight, behind)


def test_a_weight_that_has_the_form_stays_bit_for_bit() -> None:
    weight, x = correlated(16, 32)
    weight = torch.where(best_two(weight.abs()), weight, 0.0)
    assert torch.equal(sparsegpt(weight, factorize_by_fours(x.t() @ x)), weight)
