"""Compares a bundle that computes whole texts with its source: random tokens, then lines of the package's text."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np

from enginewright.optimizer.measure.distances import Divergence, divergence_of
from enginewright.optimizer.measure.pooled_runner import PooledRunner
from enginewright.optimizer.measure.text_metrics import comparable, measure_texts
from enginewright.optimizer.measure.text_results import BATCH, LONGEST, run_texts, token_texts
from enginewright.optimizer.measure.texts import BUILT_IN
from enginewright.optimizer.shared.export_records import Comparison, TextComparison
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.shared.contracts import FloatArray, ModelInfo
from enginewright.runtime.text.tokenizer import Tokenizer

from .random_tokens import check_logits, comparison
from .text import evaluation_text

LENGTHS = (1, 5, 17, 33, 64)
"""The lengths in tokens of the random texts, which the bundle computes in one step."""

MOST_TEXTS = 64
"""The most lines of the package's text that are compared."""


def compare_random_texts(runner: PooledRunner, executor: Executor, info: ModelInfo, seed: int) -> Comparison:
    """Compares texts of random tokens. The source computes each text alone, the bundle all texts in one step without
    padding.

    Raises VerificationError if results aren't finite, or the two have different shapes.
    """
    generator = np.random.default_rng(seed)
    lengths = [min(length, info.context_length) for length in LENGTHS]
    tokens = np.arange(info.vocab_size)
    tokens = tokens[tokens != runner.padding]
    texts = [generator.choice(tokens, length).tolist() for length in lengths]
    results = run_texts(executor, texts)
    return comparison(_divergence(runner, results, [runner.rows(text) for text in texts]))


def compare_sentences(
    runner: PooledRunner, executor: Executor, tokenizer: Tokenizer, info: ModelInfo
) -> TextComparison:
    """Compares the bundle with the source on lines of the built-in text.

    Raises the errors of ``compare_random_texts``.
    """
    texts = token_texts(evaluation_text().splitlines(), tokenizer, min(LONGEST, info.context_length))
    chosen = texts[:MOST_TEXTS]
    steps = [chosen[start : start + BATCH] for start in range(0, len(chosen), BATCH)]
    results = [rows for step in steps for rows in run_texts(executor, step)]
    reference = [runner.rows(text) for text in chosen]
    figures = replace(comparison(_divergence(runner, results, reference)), tokens=sum(map(len, chosen)))
    return TextComparison(
        **asdict(figures),
        text=BUILT_IN,
        window=max(map(len, chosen)),
        windows=len(chosen),
        windows_in_text=len(texts),
        perplexity=None,
        source_perplexity=None,
        metrics=measure_texts(runner.task, results, reference),
    )


def _divergence(runner: PooledRunner, results: list[FloatArray], reference: list[FloatArray]) -> Divergence:
    divergence = divergence_of(runner.task)
    for values, expected in zip(results, reference, strict=True):
        check_logits(values, expected)
        divergence.add(*comparable(values, expected))
    return divergence
