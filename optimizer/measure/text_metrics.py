"""Metrics of a model's results for texts, compared with a reference's: vectors, scores and classes.

``METRICS`` declares them. Reports, commands and budgets refer to a metric by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.contracts import FloatArray, PooledTask

from .distances import Divergence, divergence_of

NEAREST = 10
"""The number of nearest texts that a search returns."""

Results = Sequence[FloatArray]
"""The results of some texts: [1, E] each (a vector, classes, or a score), or [S, C] for the S tokens of a text."""
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TextMetric:
    """A metric of the results of some texts, where equal results give the best value.

    Attributes:
        label: the metric's name for people.
        tasks: the tasks of models that have it.
        texts: the least number of texts for which it is defined.
        compute: returns the value of a comparison.
        form: the form of a value as text, for ``format``.
        at_most: True if a value may be at most a budget's limit; False if it has to be at least the limit.
    """

    label: str
    tasks: tuple[PooledTask, ...]
    texts: int
    compute: Callable[[_Compared], float]
    form: str
    at_most: bool = False


def measure_texts(task: PooledTask, results: Results, reference: Results) -> dict[str, float | None]:
    """Returns the metrics of a task by name; None for a metric that needs more texts.

    Args:
        task: the models' task.
        results, reference: the results of the same texts, of the same shapes.
    """
    compared = _Compared(results, reference)
    return {
        name: metric.compute(compared) if len(results) >= metric.texts else None
        for name, metric in METRICS.items()
        if task in metric.tasks
    }


def shown_metrics(values: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Returns the label and the value of each metric as text; metrics of other versions are left out."""
    known = [(METRICS[name], value) for name, value in values.items() if name in METRICS]
    return [
        (metric.label, f"needs {metric.texts} texts" if value is None else format(value, metric.form))
        for metric, value in known
    ]


def comparable(values: FloatArray, reference: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns both arrays in a form for a comparison of classes.

    A single column is a score, the logit of one of two classes. So a column of zeros is added for the other one.
    """
    if values.shape[-1] > 1:
        return values, reference
    first, second = (np.concatenate([x, np.zeros_like(x)], axis=-1) for x in (values, reference))
    return first, second


def rank_correlation(a: Float64Array, b: Float64Array) -> float:
    """Returns Spearman's rank correlation of two arrays [n]; equal values share their mean rank.

    It is 1 if both are constant, and 0 if one is.
    """
    first, second = (rank - rank.mean() for rank in (_ranks(a), _ranks(b)))
    size = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / size if size else float(not first.any() and not second.any())


def _ranks(values: Float64Array) -> Float64Array:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Float64Array = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def _unit(results: Results) -> Float64Array:
    """Returns vectors [n, E] of length 1."""
    vectors = np.concatenate(results).astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit: Float64Array = vectors / np.maximum(lengths, np.finfo(np.float64).tiny)
    return unit


class _Compared:
    """The results of a model and of its reference, with intermediate values that several metrics share."""

    def __init__(self, results: Results, reference: Results) -> None:
        self.results, self.reference = results, reference

    @cached_property
    def units(self) -> tuple[Float64Array, Float64Array]:
        """The vectors of both with length 1, [n, E]."""
        return _unit(self.results), _unit(self.reference)

    @cached_property
    def cosines(self) -> Float64Array:
        """The cosine of each text's two vectors, [n]."""
        first, second = self.units
        cosines: Float64Array = (first * second).sum(axis=-1)
        return cosines

    @cached_property
    def similarities(self) -> tuple[Float64Array, Float64Array]:
        """The cosines of all pairs of texts in each model, [n, n]."""
        first, second = (unit @ unit.T for unit in self.units)
        return first, second

    @cached_property
    def divergence(self) -> Divergence:
        """The divergence of the scores from the reference's."""
        divergence = divergence_of("classify")
        for values, expected in zip(self.results, self.reference, strict=True):
            divergence.add(*comparable(values, expected))
        return divergence


def _rank_correlation_of_pairs(compared: _Compared) -> float:
    pairs = np.triu_indices(len(compared.results), 1)
    return rank_correlation(*(similarities[pairs] for similarities in compared.similarities))


def _rank_correlation_of_scores(compared: _Compared) -> float:
    both = compared.results, compared.reference
    return rank_correlation(*(np.concatenate(x)[:, 0].astype(np.float64) for x in both))


def _nearest(similarities: Float64Array) -> list[set[int]]:
    """Returns the numbers of the texts nearest to each text, without itself."""
    others = np.where(np.eye(len(similarities), dtype=bool), -np.inf, similarities)
    order = np.argsort(-others, axis=-1, kind="stable")
    return [set(row[:NEAREST].tolist()) for row in order]


def _nearest_overlap(compared: _Compared) -> float:
    pairs = zip(*map(_nearest, compared.similarities), strict=True)
    return float(np.mean([len(a & b) / NEAREST for a, b in pairs]))


_SCORES: tuple[PooledTask, ...] = ("rerank", "classify", "token_classify")

METRICS: Mapping[str, TextMetric] = {
    "cosine_min": TextMetric("least cosine", ("embed",), 1, lambda c: float(c.cosines.min()), ".6f"),
    "cosine_mean": TextMetric("mean cosine", ("embed",), 1, lambda c: float(c.cosines.mean()), ".6f"),
    "spearman": TextMetric("rank correlation of pairs", ("embed",), 3, _rank_correlation_of_pairs, ".5f"),
    "top10_overlap": TextMetric("same nearest 10", ("embed",), 2 * NEAREST + 1, _nearest_overlap, ".2%"),
    "spearman_scores": TextMetric("rank correlation of scores", ("rerank",), 3, _rank_correlation_of_scores, ".5f"),
    "kl_mean": TextMetric("mean KL", _SCORES, 1, lambda c: c.divergence.kl_mean, ".3e", at_most=True),
    "kl_max": TextMetric("largest KL", _SCORES, 1, lambda c: c.divergence.kl_max, ".3e", at_most=True),
    "top1_agreement": TextMetric("same class", _SCORES, 1, lambda c: c.divergence.top1_agreement, ".2%"),
}
"""Metric -> its definition, in the order in which metrics are shown.

A metric of search compares the nearest other texts. The correlation is Spearman's, of the similarities of all pairs of
texts, or of the scores of texts.
"""
