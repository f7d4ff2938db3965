"""Numbers from logits: log-likelihood, divergence, agreement. All in float64, a block of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from enginewright.optimizer.shared.resources import THREADS
from enginewright.runtime.shared.contracts import FloatArray

_BLOCK = 1 << 17
"""Logits in float64 at a time: 1 MiB, of which there are some five copies; they stay in a core's cache."""


def log_softmax(logits: FloatArray) -> npt.NDArray[np.float64]:
    """Log-probabilities over the last axis: [n, V] float32 -> [n, V] float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


def log_likelihood(logits: FloatArray, targets: Sequence[int]) -> float:
    """The sum of the targets' log-probabilities in nats; logits [n, V], targets [n]."""
    total = 0.0
    for rows in _blocks(logits):
        total += float(_of_targets(log_softmax(logits[rows]), targets[rows]).sum())
    return total


@dataclass
class Likelihood:
    """The likelihood of a text under a model: the number of tokens, and the sum of their log-probabilities in nats."""

    tokens: int = 0
    total: float = 0.0

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood per token in nats."""
        return -self.total / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of the mean; infinite beyond what a float holds."""
        return math.exp(self.nll) if self.nll < 700 else math.inf

    def add(self, logits: FloatArray, targets: Sequence[int]) -> None:
        """Logits [n, V] before each of the tokens [n]."""
        self.tokens += len(targets)
        self.total += log_likelihood(logits, targets)


@dataclass
class Divergence:
    """The difference of a model from a reference, over the same tokens.

    Attributes:
        model, reference: the likelihood of the text under each, over the tokens whose successors are known.
        tokens: tokens compared.
        kl_sum, kl_max: KL(reference || model) in nats: the sum over the tokens, and the largest.
        agreed: tokens for which both predict the same token as the likeliest (the first of equal ones).
        logit_difference: largest absolute difference of two logits.
        largest_logit: largest absolute value of the reference's logits.
    """

    model: Likelihood
    reference: Likelihood
    tokens: int = 0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    agreed: int = 0
    logit_difference: float = 0.0
    largest_logit: float = 0.0

    @property
    def kl_mean(self) -> float:
        """KL per token in nats."""
        return self.kl_sum / self.tokens

    @property
    def top1_agreement(self) -> float:
        """Share of the tokens before which both find the same token the likeliest."""
        return self.agreed / self.tokens

    def add(self, logits: FloatArray, reference: FloatArray, targets: Sequence[int] | None = None) -> None:
        """Logits [n, V] of both before each of the tokens [n], if these are known.

        Blocks are compared side by side, as numpy leaves Python's lock to others while it computes, and added in their
        order: sums are the same for any number of cores.
        """

        def compare(rows: slice) -> _Compared:
            return _Compared.of(logits[rows], reference[rows], None if targets is None else targets[rows])

        blocks = list(_blocks(logits))
        with ThreadPoolExecutor(max(1, min(len(blocks), THREADS))) as threads:
            for block in threads.map(compare, blocks):
                self._add(block)

    def _add(self, found: _Compared) -> None:
        for total, likelihood in zip(found.likelihoods, (self.reference, self.model), strict=False):
            likelihood.tokens += len(found.kl)
            likelihood.total += total
        self.tokens += len(found.kl)
        self.kl_sum += float(found.kl.sum())
        self.kl_max = max(self.kl_max, float(found.kl.max()))
        self.agreed += found.agreed
        self.logit_difference = max(self.logit_difference, found.logit_difference)
        self.largest_logit = max(self.largest_logit, found.largest_logit)


@dataclass(frozen=True)
class _Compared:
    """The terms that ``Divergence`` sums, for a block of rows: ``kl`` [b], and the reference's and the model's
    likelihood.
    """

    kl: npt.NDArray[np.float64]
    likelihoods: tuple[float, ...]
    agreed: int
    logit_difference: float
    largest_logit: float

    @staticmethod
    def of(logits: FloatArray, reference: FloatArray, targets: Sequence[int] | None) -> _Compared:
        p, q = log_softmax(reference), log_softmax(logits)  # [b, V]
        return _Compared(
            # Never negative but for rounding; of equal logits exactly 0.
            kl=np.maximum((np.exp(p) * (p - q)).sum(axis=-1), 0.0),
            likelihoods=() if targets is None else tuple(float(_of_targets(of, targets).sum()) for of in (p, q)),
            # On the logits themselves: subtracting the norm may round two of them to one.
            agreed=int((reference.argmax(axis=-1) == logits.argmax(axis=-1)).sum()),
            logit_difference=float(np.abs(reference.astype(np.float64) - logits).max()),
            largest_logit=float(np.abs(reference).max()),
        )


def _of_targets(log_probabilities: npt.NDArray[np.float64], targets: Sequence[int]) -> npt.NDArray[np.float64]:
    """Each row's entry of its target: [b, V], [b] -> [b]."""
    return np.take_along_axis(log_probabilities, np.asarray(targets)[:, None], axis=-1)[:, 0]


def _blocks(logits: FloatArray) -> Iterator[slice]:
    """Slices of rows that together have at most _BLOCK logits, or one row."""
    rows = max(1, _BLOCK // logits.shape[-1])
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)
