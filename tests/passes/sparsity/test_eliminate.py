"""The choice of inputs that go is that of removing one after the other, however many are looked at together."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.sparsity import eliminate as module
from enginewright.passes.sparsity.eliminate import Moments, compensation, eliminate, eliminate_blocks, output_error


def naive(moments: Moments, weight: torch.Tensor, count: int, damping: float) -> list[int]:
    inverse, left = torch.linalg.inv(moments.damped(damping)), weight.double().clone()
    gone: list[int] = []
    for _ in range(count):
        scores = left.square().sum(0) / inverse.diagonal()
        scores[gone] = torch.inf
        best = int(scores.argmin())
        row = inverse[best] / inverse[best, best]
        left -= left[:, best : best + 1] * row
        inverse = inverse - inverse[:, best : best + 1] * row
        gone.append(best)
    return sorted(gone)


def problem(size: int, seed: int) -> tuple[Moments, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * size, size, generator=generator) @ torch.randn(size, size, generator=generator)
    return Moments.from_inputs(x, rows=17), torch.randn(20, size, generator=generator), x


@pytest.mark.parametrize("together", [1, 3, 8, 64])
@pytest.mark.parametrize(("size", "count"), [(24, 23), (40, 20)])
def test_many_at_once_are_one_by_one(size: int, count: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUND", together)
    moments, weight, _ = problem(size, together)
    assert eliminate(moments, weight, count, 1e-6).tolist() == naive(moments, weight, count, 1e-6)


def test_blocks_of_one_are_single_inputs() -> None:
    moments, weight, _ = problem(16, 5)
    assert eliminate_blocks(moments, weight, [[i] for i in range(16)], 9, 1e-6) == naive(moments, weight, 9, 1e-6)


@pytest.mark.parametrize("size", [12, 30])
def test_what_is_made_up_for_is_the_least_squares_fit(size: int) -> None:
    moments, weight, x = problem(size, size)
    removed, left = torch.arange(0, size, 3), torch.tensor([i for i in range(size) if i % 3])
    mix = compensation(moments, removed, left, 1e-9)
    wide = x.double()
    fit = torch.linalg.lstsq(wide[:, left], wide[:, removed]).solution.t()  # [removed, kept]
    torch.testing.assert_close(mix.double(), fit, rtol=1e-3, atol=1e-3)  # float32, and moments square the condition
    y = wide @ weight.double().t()
    new = wide[:, left] @ (weight[:, left] + weight[:, removed] @ mix).double().t()
    expected = float((y - new).square().sum() / y.square().sum())
    assert output_error(moments, weight, removed, left, mix) == pytest.approx(expected, rel=1e-3)
    assert expected < output_error(moments, weight, removed, left, None)
