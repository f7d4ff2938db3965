"""Statistics of logits: log-likelihood, KL divergence, agreement. All are computed in float64, a block of rows at a
time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from enginewright.optimizer.shared.resources import THREADS
from enginewright.runtime.shared.contracts import FloatArray, PooledTask

_BLOCK = 1 << 17
"""The number of float64 logits that are compared at a time: 1 MiB. Five or so copies then fit into a core's cache."""


def log_softmax(logits: FloatArray) -> npt.NDArray[np.float64]:
    """Returns the log-probabilities [n, V] in float64 of logits [n, V] in float32."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


def log_likelihood(logits: FloatArray, targets: Sequence[int]) -> float:
    """Returns the sum of the target tokens' log-probabilities, in nats, for logits [n, V] and target ids [n]."""
    total = 0.0
    for rows in _blocks(logits):
        total += float(_of_targets(log_softmax(logits[rows]), targets[rows]).sum())
    return total


@dataclass
class Likelihood:
    """The likelihood of a text under a model, summed up batch by batch.

    Attributes:
        tokens: the number of tokens scored.
        total: the sum of their log-probabilities, in nats.
    """

    tokens: int = 0
    total: float = 0.0

    @property
    def nll(self) -> float:
        """The mean negative log-likelihood per token, in nats."""
        return -self.total / self.tokens

    @property
    def perplexity(self) -> float:
        """The exponential of `nll`; infinite if that overflows a float."""
        return math.exp(self.nll) if self.nll < 700 else math.inf

    def add(self, logits: FloatArray, targets: Sequence[int]) -> None:
        """Adds the tokens ``targets`` [n], which the logits [n, V] predict."""
        self.tokens += len(targets)
        self.total += log_likelihood(logits, targets)


@dataclass
class Divergence:
    """The difference between a model's logits and a reference's, over the same tokens.

    Attributes:
        model, reference: the likelihood of the text under each, over the tokens whose successor is known.
        tokens: the number of tokens compared.
        kl_sum, kl_max: KL(reference || model) in nats: its sum over the tokens, and its largest value.
        agreed: the number of tokens after which both models have the same likeliest next token (the first if there is a
            tie).
        logit_difference: the largest absolute difference between two logits.
        largest_logit: the largest absolute value of a logit of the reference.
        of_vectors: True compares vectors: the distance is 1 - cosine in place of the KL divergence.
    """

    model: Likelihood
    reference: Likelihood
    tokens: int = 0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    agreed: int = 0
    logit_difference: float = 0.0
    largest_logit: float = 0.0
    of_vectors: bool = False

    @property
    def kl_mean(self) -> float:
        """The mean KL divergence per token, in nats."""
        return self.kl_sum / self.tokens

    @property
    def top1_agreement(self) -> float:
        """The share of tokens after which both models have the same likeliest next token."""
        return self.agreed / self.tokens

    def add(self, logits: FloatArray, reference: FloatArray, targets: Sequence[int] | None = None) -> None:
        """Compares the logits of both models for n tokens and adds the result to the sums.

        Blocks of rows are compared in parallel, and added in order: the sums don't depend on the number of cores.

        Args:
            logits: the model's logits, [n, V].
            reference: the reference's logits, [n, V].
            targets: the tokens [n] that the logits predict; None if they aren't known, and then no likelihood is added.
        """

        def compare(rows: slice) -> _Compared:
            if self.of_vectors:
                return _Compared.of_vectors(logits[rows], reference[rows])
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
    """The terms that ``Divergence`` sums, for one block of b rows.

    Attributes:
        kl: KL(reference || model) of each row, [b], in nats.
        likelihoods: the sum of the targets' log-probabilities under the reference, and under the model; empty without
            targets.
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

    @staticmethod
    def of_vectors(vectors: FloatArray, reference: FloatArray) -> _Compared:
        """Compares vectors [b, E]. The value 1 - cosine takes the place of the KL divergence."""
        x, y = vectors.astype(np.float64), reference.astype(np.float64)
        lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
        return _Compared(
            kl=np.maximum(1 - (x * y).sum(axis=-1) / np.maximum(lengths, np.finfo(np.float64).tiny), 0.0),
            likelihoods=(),
            agreed=int((reference.argmax(axis=-1) == vectors.argmax(axis=-1)).sum()),
            logit_difference=float(np.abs(x - y).max()),
            largest_logit=float(np.abs(reference).max()),
        )


def divergence_of(task: PooledTask | None) -> Divergence:
    """Returns an empty divergence for a model's results: vectors of texts, or logits; None for a language model."""
    return Divergence(Likelihood(), Likelihood(), of_vectors=task == "embed")


def _of_targets(log_probabilities: npt.NDArray[np.float64], targets: Sequence[int]) -> npt.NDArray[np.float64]:
    """Returns the log-probability of each row's target: [b, V] and [b] -> [b]."""
    return np.take_along_axis(log_probabilities, np.asarray(targets)[:, None], axis=-1)[:, 0]


def _blocks(logits: FloatArray) -> Iterator[slice]:
    """Yields slices of rows; each has at most _BLOCK logits, and at least one row."""
    rows = max(1, _BLOCK // logits.shape[-1])
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)
