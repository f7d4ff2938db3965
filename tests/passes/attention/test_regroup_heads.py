"""Heads of one attention in groups: which they are, and how near what they give stays, at two sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from enginewright.passes.attention.fit_kv_heads import RopeLayout
from enginewright.passes.attention.regroup_heads import Seen, mean_mixes, neighbours, regroup
from enginewright.passes.framework.kv_options import KvOptions

SIZES = [(8, 4, 8), (6, 6, 12)]  # query heads, key/value heads, and their dimensions
TOKENS = 80


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    each = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(each, 1) for x in (k, v))
    scores = torch.einsum("tnd,snd->nts", q, k) * q.shape[2] ** -0.5
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("nts,snd->tnd", scores.masked_fill(later, float("-inf")).softmax(-1), v)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def seen(queries: int, heads: int, size: int, alike: tuple[int, ...] | None = None) -> Seen:
    """Random values. ``alike``: which of some random heads of keys and values each one is."""
    generator = torch.Generator().manual_seed(queries + size)
    q, k, v = (torch.randn(TOKENS, n, size, generator=generator) for n in (queries, heads, heads))
    if alike is not None:
        k, v = k[:, list(alike)], v[:, list(alike)]
    output = torch.randn(24, queries * size, generator=generator)
    return Seen(q, k, v, same, same, False, RopeLayout.from_sizes(size, size // 2, False), attend, output)


def test_neighbours_and_their_mean() -> None:
    assert neighbours(6, 2) == ((0, 1, 2), (3, 4, 5))
    mixes = mean_mixes(((0, 2), (1, 3)), 8, 4, 6)
    assert mixes.order == (0, 1, 4, 5, 2, 3, 6, 7) and mixes.reordered  # two query heads go with each
    assert mixes.keys.shape == (2, 4, 8) and mixes.values.shape == (2, 6, 12)
    assert not mean_mixes(neighbours(4, 2), 8, 4, 6).reordered


@pytest.mark.parametrize(("queries", "heads", "size"), SIZES)
def test_a_fit_is_nearer_than_the_mean(queries: int, heads: int, size: int) -> None:
    attention = seen(queries, heads, size)
    fitted = regroup(attention, heads // 2, KvOptions(kv_heads=1, method="calibrated", grouping="neighbours"))
    mean = regroup(attention, heads // 2, KvOptions(kv_heads=1, method="mean", grouping="neighbours"))
    assert fitted.mixes.groups == mean.mixes.groups == neighbours(heads, heads // 2)
    assert 0 < fitted.error < 0.8 * mean.error
    assert fitted.mixes.queries is not None and fitted.mixes.queries.shape == (queries, size, size)
    assert mean.mixes.queries is None and mean.mixes.output is None and mean.mixes.note == ""
    for one in (fitted, mean):
        assert one.context.shape == attention.q.shape and one.output.shape == attention.output.shape
        scores, expected = (
            one.context.flatten(1) @ one.output.T,
            attend(attention.q, attention.k, attention.v, torch.arange(queries)),
        )
        expected = expected.flatten(1) @ attention.output.T
        assert one.error == pytest.approx(float((scores - expected).square().sum() / expected.square().sum()), rel=1e-3)


@pytest.mark.parametrize("method", ["mean", "calibrated"])
@pytest.mark.parametrize(("queries", "heads", "size"), SIZES)
def test_heads_that_are_one_over_again_cost_nothing(method: str, queries: int, heads: int, size: int) -> None:
    attention = seen(queries, heads, size, tuple(i % 2 for i in range(heads)))  # every second head is the same
    regrouped = regroup(attention, 2, KvOptions(kv_heads=1, method=method, grouping="similar"))  # type: ignore[arg-type]
    assert sorted(map(sorted, regrouped.mixes.groups)) == [list(range(0, heads, 2)), list(range(1, heads, 2))]
    assert regrouped.mixes.reordered
    assert regrouped.error < 1e-8  # float32 products in another order; a damping of the fit
    apart = regroup(attention, 2, KvOptions(kv_heads=1, method="mean", grouping="neighbours"))
    assert apart.error > 0.01


def test_keys_that_differ_by_a_rotation_are_fitted_and_not_averaged() -> None:
    """One head's keys are the other's turned by a right angle in every pair: their mean is neither."""
    attention = seen(4, 2, 8, (0, 0))
    turned = attention.k.clone()
    turned[:, 1] = torch.cat((-attention.k[:, 1, 4:], attention.k[:, 1, :4]), -1)
    attention = replace(attention, k=turned)
    fitted, mean = (
        regroup(attention, 1, KvOptions(kv_heads=1, method=method, grouping="neighbours"))  # type: ignore[arg-type]
        for method in ("calibrated", "mean")
    )
    assert fitted.error < 1e-8 < 0.01 < mean.error


def test_behind_a_norm_keys_are_not_mixed_by_numbers_that_queries_undo() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt()

    attention = replace(seen(8, 4, 8), normed=True, after_q=norm, after_k=norm)
    regrouped = regroup(attention, 2, KvOptions(kv_heads=1, method="calibrated", grouping="neighbours"))
    assert regrouped.mixes.queries is None and "a norm stands behind the keys" in regrouped.mixes.note
    assert "head" in regrouped.mixes.note and 0 < regrouped.error < 1
