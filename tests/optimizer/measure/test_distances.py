from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from enginewright.optimizer.measure import distances as measure
from enginewright.optimizer.measure.distances import Divergence, Likelihood, log_likelihood, log_softmax

# Both in float64, over up to 5000 terms of 1e-3 to 10: rounding stays below 1e-12.
TOLERANCE = 1e-11

SIZES = [(3, 17), (41, 5000)]


def logits(n: int, v: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, v)) * 4).astype(np.float32)


def targets(n: int, v: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(9).integers(0, v, n)]


def measured(of: np.ndarray, reference: np.ndarray, ids: list[int]) -> Divergence:
    divergence = Divergence(Likelihood(), Likelihood())
    divergence.add(of, reference, ids)
    return divergence


@pytest.mark.parametrize(("n", "v"), SIZES)
@pytest.mark.parametrize("block", [1, 1 << 21])
def test_it_equals_torch(n: int, v: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_BLOCK", block)  # 1: row by row
    a, b, ids = logits(n, v, 1), logits(n, v, 2), targets(n, v)
    p, q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (b, a))
    divergence = measured(a, b, ids)
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    rows = torch.arange(n)
    assert divergence.kl_sum == pytest.approx(float(kl.sum()), rel=TOLERANCE)
    assert divergence.kl_max == pytest.approx(float(kl.max()), rel=TOLERANCE)
    assert divergence.agreed == int((p.argmax(-1) == q.argmax(-1)).sum())
    assert divergence.logit_difference == float(np.abs(a.astype(np.float64) - b).max())
    assert divergence.model.total == pytest.approx(float(q[rows, ids].sum()), rel=TOLERANCE)
    assert divergence.reference.total == pytest.approx(float(p[rows, ids].sum()), rel=TOLERANCE)
    assert log_likelihood(a, ids) == pytest.approx(divergence.model.total, rel=TOLERANCE)
    assert divergence.model.tokens == divergence.reference.tokens == n


def test_a_model_is_nowhere_from_itself() -> None:
    a = logits(41, 5000, 1)
    same = measured(a, a.copy(), targets(41, 5000))
    assert (same.kl_sum, same.kl_max, same.agreed, same.logit_difference) == (0.0, 0.0, 41, 0.0)
    a[7, 3] += 0.01
    assert measured(a, logits(41, 5000, 1), targets(41, 5000)).kl_sum > 0


def test_large_logits_do_not_overflow() -> None:
    logs = log_softmax(np.array([[3e38, 3e38, -3e38]], np.float32))
    np.testing.assert_allclose(logs[0, :2], -math.log(2), rtol=1e-15)  # two equals share the whole
    assert np.isfinite(logs).all()


def test_perplexity_of_a_guess() -> None:
    likelihood = Likelihood()
    likelihood.add(np.zeros((3, 50), np.float32), [4, 0, 49])
    assert likelihood.perplexity == pytest.approx(50, rel=TOLERANCE)
    assert Likelihood(1, -1e6).perplexity == math.inf


@pytest.mark.parametrize(("n", "v"), SIZES)
def test_sums_are_the_same_for_any_number_of_cores(n: int, v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_BLOCK", v)  # a row each
    a, b, ids = logits(n, v, 1), logits(n, v, 2), targets(n, v)
    totals = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(measure, "THREADS", threads)
        totals.append(measured(a, b, ids))
    assert totals[0] == totals[1] == totals[2]
    assert totals[0].tokens == n


def test_nothing_is_compared_where_there_is_nothing() -> None:
    assert measured(np.empty((0, 5), np.float32), np.empty((0, 5), np.float32), []).tokens == 0
