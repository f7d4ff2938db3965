"""Metrics of vectors and scores, beside scipy's rank correlation and plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.optimizer.measure.text_metrics import METRICS, measure_texts, rank_correlation, shown_metrics


def vectors(count: int, size: int, noise: float = 0.0) -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    rows = generator.normal(size=(count, size))
    return [row[None].astype(np.float32) for row in rows + noise * np.random.default_rng(4).normal(size=rows.shape)]


@pytest.mark.parametrize("count", [3, 40])
def test_rank_correlation_is_scipy_s(count: int) -> None:
    spearman = pytest.importorskip("scipy.stats").spearmanr
    generator = np.random.default_rng(count)
    a, b = generator.normal(size=count), generator.integers(0, 5, count).astype(float)  # with ties
    assert rank_correlation(a, b) == pytest.approx(spearman(a, b).statistic, abs=1e-12)
    assert rank_correlation(a, -a) == pytest.approx(-1)
    assert rank_correlation(a, np.zeros(count)) == 0
    assert rank_correlation(np.zeros(count), np.zeros(count)) == 1


@pytest.mark.parametrize(("count", "size"), [(30, 8), (45, 32)])
def test_vectors(count: int, size: int) -> None:
    a, b = vectors(count, size), vectors(count, size, 0.3)
    metrics = measure_texts("embed", a, b)
    cosines = [float(x[0] @ y[0]) / float(np.linalg.norm(x) * np.linalg.norm(y)) for x, y in zip(a, b, strict=True)]
    assert metrics["cosine_min"] == pytest.approx(min(cosines), abs=1e-6)
    assert metrics["cosine_mean"] == pytest.approx(sum(cosines) / count, abs=1e-6)

    def nearest(rows: list[np.ndarray], i: int) -> set[int]:
        def similarity(j: int) -> float:
            return float(rows[i][0] @ rows[j][0]) / float(np.linalg.norm(rows[j]))

        return set(sorted((j for j in range(count) if j != i), key=similarity, reverse=True)[:10])

    overlap = sum(len(nearest(a, i) & nearest(b, i)) for i in range(count)) / (10 * count)
    assert metrics["top10_overlap"] == pytest.approx(overlap, abs=0.1 / count)
    assert measure_texts("embed", a, [7 * x for x in a]) == {name: pytest.approx(1) for name in metrics}


def test_scores_and_classes() -> None:
    scores, worse = vectors(20, 1), vectors(20, 1, 0.5)
    assert set(measure_texts("rerank", scores, worse)) == {"spearman_scores", "kl_mean", "kl_max", "top1_agreement"}
    metrics = measure_texts("classify", vectors(20, 3), vectors(20, 3, 0.5))
    same = [x.argmax() == y.argmax() for x, y in zip(vectors(20, 3), vectors(20, 3, 0.5), strict=True)]
    assert metrics["top1_agreement"] == sum(same) / 20
    assert (
        metrics["kl_mean"] is not None and metrics["kl_max"] is not None and 0 < metrics["kl_mean"] < metrics["kl_max"]
    )


def test_metrics_that_need_more_texts_say_so() -> None:
    metrics = measure_texts("embed", vectors(2, 8), vectors(2, 8))
    assert metrics["spearman"] is None
    assert dict(shown_metrics(metrics))["same nearest 10"] == f"needs {METRICS['top10_overlap'].texts} texts"
    assert shown_metrics({"of another version": 1.0}) == []
