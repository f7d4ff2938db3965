"""Choosing inputs that go and compensating for them, held to tokens that weren't fitted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from enginewright.passes.ir.chosen_rows import Chosen, MixedColumns
from enginewright.passes.ir.weights import Source
from enginewright.passes.sparsity.eliminate import Moments
from enginewright.passes.sparsity.fit_removed import fitted, halves_of, single_inputs


def test_every_second_sequence_or_two_halves_of_one() -> None:
    first, second = halves_of([torch.zeros(n) for n in (2, 3, 1)])
    assert (first.tolist(), second.tolist()) == ([0, 1, 5], [2, 3, 4])
    first, second = halves_of([torch.zeros(5)])
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3, 4])


def problem(size: int, copies: int, tokens: int = 400) -> tuple[torch.Tensor, torch.Tensor, list[Moments]]:
    """Inputs of which the last ``copies`` are the sum of the two first, a weight, and moments of two halves."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(tokens, size, generator=generator)
    x[:, size - copies :] = x[:, :1] + x[:, 1:2]
    weight = torch.randn(5, size, generator=generator)
    halves = [Moments(half.double().T @ half.double(), len(half)) for half in x.chunk(2)]
    return x, weight, halves


@pytest.mark.parametrize(("size", "copies"), [(8, 2), (24, 5)])
def test_inputs_that_others_are_made_of_are_made_up_for(size: int, copies: int, tmp_path: Path) -> None:
    x, weight, halves = problem(size, copies)
    fit = fitted(halves, weight, *single_inputs(copies), correct=True)
    assert sorted([*fit.removed.tolist(), *fit.kept.tolist()]) == list(range(size))
    assert fit.mix is not None and fit.error < 1e-6 < fit.plain_error
    expected = x @ weight.T
    # Float32 products of some units, and a fit damped by 1e-7 of the moments.
    torch.testing.assert_close(fit.apply(x, weight, None), expected, atol=1e-3, rtol=0)
    base = Source("w", tuple(weight.shape), weight.dtype, lambda: weight)
    for file in (None, tmp_path / "mix"):
        expr = fit.expression(base, file)
        assert isinstance(expr, MixedColumns)
        torch.testing.assert_close(x[:, fit.kept] @ expr.evaluate().T, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("size", [8, 24])
def test_inputs_that_nothing_is_like_go_plainly(size: int) -> None:
    x, weight, halves = problem(size, 0)
    weight[:, 3] = 0  # it adds nothing
    for correct in (False, True):
        fit = fitted(halves, weight, *single_inputs(1), correct=correct)
        assert fit.removed.tolist() == [3]
        torch.testing.assert_close(fit.apply(x, weight, None), x @ weight.T, atol=1e-4, rtol=0)
    plain = fitted(halves, weight, *single_inputs(1), correct=False)
    assert plain.mix is None and plain.error == plain.plain_error
    assert isinstance(plain.expression(Source("w", tuple(weight.shape), weight.dtype, lambda: weight), None), Chosen)
