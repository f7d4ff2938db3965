"""Compares a bundle that computes whole texts with its source: random tokens, then sentences of the package's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from enginewright.optimizer.measure.distances import Divergence, divergence_of
from enginewright.optimizer.measure.pooled_runner import PooledRunner
from enginewright.optimizer.measure.texts import BUILT_IN
from enginewright.optimizer.shared.export_records import Comparison, TextComparison
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.shared.contracts import FloatArray, ModelInfo, StepInput
from enginewright.runtime.shared.step_schema import CLASSES, POOLED, TYPES
from enginewright.runtime.text.tokenizer import Tokenizer

from .measure import comparable
from .random_tokens import check_logits, comparison
from .text import evaluation_text

LENGTHS = (1, 5, 17, 33, 64)
"""Tokens of the random texts, which are computed in one step."""

MOST_TEXTS = 64
"""The most sentences of the package's text that are compared."""

LONGEST = 128
"""The most tokens of a sentence."""

_BATCH = 8
"""Sentences of a step."""


def compare_random_texts(runner: PooledRunner, executor: Executor, info: ModelInfo, seed: int) -> Comparison:
    """Compares texts of random tokens: each alone in the source, all in one step of the bundle. No text has padding.

    Raises VerificationError if results aren't finite, or the two have different shapes.
    """
    generator = np.random.default_rng(seed)
    lengths = [min(length, info.context_length) for length in LENGTHS]
    tokens = np.arange(info.vocab_size)
    tokens = tokens[tokens != runner.padding]
    texts = [generator.choice(tokens, length).tolist() for length in lengths]
    divergence = divergence_of(runner.task)
    _compare(runner, executor, texts, divergence)
    return comparison(divergence)


def compare_sentences(
    runner: PooledRunner, executor: Executor, tokenizer: Tokenizer, info: ModelInfo
) -> TextComparison:
    """Compares sentences of the package's text. Raises the errors of ``compare_random_texts``."""
    lines = [line for line in evaluation_text().splitlines() if line.strip()]
    texts = [tokenizer.encode(line)[: min(LONGEST, info.context_length)] for line in lines]
    chosen = [text for text in texts if text][:MOST_TEXTS]
    divergence = divergence_of(runner.task)
    for start in range(0, len(chosen), _BATCH):
        _compare(runner, executor, chosen[start : start + _BATCH], divergence)
    figures = replace(comparison(divergence), tokens=sum(map(len, chosen)))
    return TextComparison(
        **asdict(figures),
        text=BUILT_IN,
        window=max(map(len, chosen)),
        windows=len(chosen),
        windows_in_text=len(texts),
        perplexity=None,
        source_perplexity=None,
    )


def _compare(runner: PooledRunner, executor: Executor, texts: Sequence[Sequence[int]], divergence: Divergence) -> None:
    for text, values in zip(texts, run_texts(executor, texts), strict=True):
        reference = runner.rows(text)
        check_logits(values, reference)
        divergence.add(*comparable(values, reference))


def run_texts(executor: Executor, texts: Sequence[Sequence[int]]) -> list[FloatArray]:
    """Returns the results of texts of token ids, computed in one step: [1, E] each, or [S, C] of S tokens."""
    counts = [len(text) for text in texts]
    tokens = sum(counts)
    of_texts = POOLED in executor.caps.outputs
    name = POOLED if of_texts else CLASSES
    step = StepInput.packed(
        ids=np.concatenate([np.asarray(text, np.int32) for text in texts]),
        counts=counts,
        kv_len=counts,
        tables={},
        groups=(),
        rows=np.cumsum(counts) - 1 if of_texts else np.arange(tokens),
        more={TYPES: np.zeros(tokens, np.int32)} if TYPES in executor.caps.ports else None,
        outputs=(name,),
    )
    values = executor.submit(step).result().outputs[name]
    return np.split(np.array(values), np.cumsum([1] * len(texts) if of_texts else counts)[:-1])
