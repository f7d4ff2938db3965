"""The fits by themselves: best among others, exact where they can be, at two sizes."""

from __future__ import annotations

import pytest
import torch

import enginewright.passes.ops  # noqa: F401  (registers torch.ops.ew)
from enginewright.passes.attention.fit_kv_heads import (
    RopeLayout,
    balanced_groups,
    fit_keys,
    fit_output,
    low_rank,
    mean_of_heads,
    one_of_heads,
)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def score_error(q: torch.Tensor, k: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor) -> float:
    """Mean squared error of the scores of all pairs of tokens: q [T, G, g, D], k [T, G, D]."""
    scores = k.flatten(1) @ keys.T
    now = torch.einsum("tgnd,ged,se->tgns", q, queries, scores)
    return float((now - torch.einsum("tgnd,sgd->tgns", q, k)).square().mean())


@pytest.mark.parametrize(("heads", "size"), [(2, 8), (3, 12)])
@pytest.mark.parametrize(("pairs", "interleaved"), [(4, False), (4, True), (2, False), (0, False)])
def test_keys_are_fitted_better_than_their_mean(heads: int, size: int, pairs: int, interleaved: bool) -> None:
    q, k = numbers(300, heads, 2, size), numbers(300, heads, size, seed=1) * torch.linspace(0.3, 2, size)
    fitted = fit_keys(q, k, RopeLayout.from_sizes(size, pairs, interleaved))
    same = torch.eye(size, dtype=torch.float64).expand(heads, -1, -1)
    assert score_error(q, k, fitted.keys, fitted.queries) < score_error(q, k, mean_of_heads(heads, size), same)
    error = (k.flatten(1) @ fitted.keys.T).square().mean()
    assert 0.2 < float(error / k.square().mean()) < 5  # as large as keys are


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_changes_nothing_of_the_fit(interleaved: bool) -> None:
    """Scores between positions stay, as a mix of pairs commutes with their rotation."""
    ew, size = torch.ops.ew, 12
    q, k = numbers(40, 2, 1, size).float(), numbers(40, 2, size, seed=3).float()
    table = ew.rope_table(torch.arange(40), 10000.0 ** -torch.linspace(0, 1, 4), 1.0)  # 8 of 12 dimensions
    fitted = fit_keys(q, k, RopeLayout.from_sizes(size, 4, interleaved))
    mixed = (k.flatten(1) @ fitted.keys.float().T)[:, None]
    turned = ew.rope(k, table, interleaved).flatten(1) @ fitted.keys.float().T
    # Sums of 24 float32 products of numbers around 1.
    torch.testing.assert_close(ew.rope(mixed, table, interleaved)[:, 0], turned, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "size"), [(2, 6), (4, 5)])
def test_the_best_directions_beat_others_and_are_exact_where_they_suffice(heads: int, size: int) -> None:
    x = numbers(400, heads * size)
    roots = numbers(heads, size, size, seed=2)
    weights = roots @ roots.mT

    def error(values: torch.Tensor, encode: torch.Tensor, decode: torch.Tensor) -> float:
        off = (values - values @ encode.T @ decode.T).unflatten(1, (heads, size))
        return float(torch.einsum("tgi,gij,tgj->", off, weights, off))

    encode, decode = low_rank(x.T @ x / 400, weights, size)
    mean = mean_of_heads(heads, size)
    assert error(x, encode, decode) < error(x, mean, torch.eye(size, dtype=torch.float64).repeat(heads, 1))
    for seed in range(3):  # no direction nearby is better
        step = 1e-3 * numbers(size, heads * size, seed=seed)
        assert error(x, encode, decode) <= error(x, encode + step, decode) + 1e-9
    alike = numbers(400, size) @ numbers(heads * size, size, seed=7).T
    encode, decode = low_rank(alike.T @ alike / 400, weights, size)
    assert error(alike, encode, decode) < 1e-12 * float(alike.square().sum())


@pytest.mark.parametrize(("tokens", "size"), [(64, 8), (400, 20)])
def test_output_is_fitted_where_there_is_something_to_fit(tokens: int, size: int) -> None:
    now, output = numbers(tokens, size), numbers(10, size, seed=1)
    first, true = torch.eye(size, dtype=torch.float64), numbers(size, size, seed=4)
    fitted = fit_output(now @ true.T, now, first, output)
    assert (fitted - true).norm() < 0.02 * true.norm()  # what a ridge of 1e-4 leaves
    assert torch.equal(fit_output(now, now, first, output), first)  # nothing to do
    noise = numbers(tokens, size, seed=5)
    left = fit_output(now + noise, now, first, output)
    assert (left - first).norm() < 0.8 * first.norm()  # held-out tokens keep it from fitting noise


def test_heads_are_grouped_by_likeness() -> None:
    similarity = torch.full((6, 6), 0.1)
    for a, b in ((0, 4), (1, 3), (2, 5)):
        similarity[a, b] = similarity[b, a] = 0.9
    assert balanced_groups(similarity, 3) == ((0, 4), (1, 3), (2, 5))
    assert balanced_groups(torch.ones(4, 4), 2) == ((0, 1), (2, 3))
    assert balanced_groups(similarity[:4, :4], 4) == ((0,), (1,), (2,), (3,))


def test_means_and_single_heads() -> None:
    x = numbers(3, 4)
    assert torch.allclose(x.flatten() @ mean_of_heads(3, 4).T, x.mean(0))
    assert torch.equal(x.flatten() @ one_of_heads(1, 3, 4).T, x[1])
