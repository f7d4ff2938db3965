"""Compares source and bundle on the package's text, which shows what a recipe's loss of precision costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import torch

from enginewright.optimizer.measure.distances import Divergence, Likelihood
from enginewright.optimizer.measure.source_runner import ROWS, SourceRunner
from enginewright.optimizer.measure.texts import BUILT_IN, EVALUATION_TEXT, read_text
from enginewright.optimizer.measure.windows import DEFAULT_WINDOW, plan_windows, split_prefix, spread
from enginewright.optimizer.shared.export_records import TextComparison
from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.requests.request import PromptRequest
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.contracts import FloatArray, ModelInfo
from enginewright.runtime.shared.progress import Progress, ProgressEvent
from enginewright.runtime.shared.step_schema import LOGITS
from enginewright.runtime.text.tokenizer import Tokenizer

from .random_tokens import check_logits, comparison

LEAST_CONTEXT = 64
"""The smallest context, in tokens, of a model that is compared on the text."""

MOST_WINDOWS = 8
"""The most windows of the text: some 4,000 tokens, from which the mean KL is known to a few per cent."""

_WORK = 1 << 38
"""The most work of the source, as parameters times tokens: half a minute on two cores. One window is always run."""


def why_no_text(tokenizer: Tokenizer | None, info: ModelInfo) -> str | None:
    """Returns the reason why the text can't be compared; None if it can."""
    if tokenizer is None:
        return "the model has no tokenizer"
    if info.context_length < LEAST_CONTEXT:
        return f"the context of {info.context_length} tokens is too small"
    prefix, ids = split_prefix(tokenizer, evaluation_text())
    largest = max((*prefix, *ids))
    if largest >= info.vocab_size:
        return f"the tokenizer has token {largest}, the model a vocabulary of {info.vocab_size}"
    return None


def windows_to_compare(parameters: int, window: int, available: int) -> list[int]:
    """Returns the indices of the windows to compare, spread over the text: at least one, and fewer for larger models.

    Args:
        parameters: the number of the model's parameters.
        window: the tokens of a window.
        available: the number of windows of the text.
    """
    count = max(1, min(available, MOST_WINDOWS, _WORK // (max(parameters, 1) * window)))
    return spread(count, available)


def compare_text(
    runner: SourceRunner, executor: Executor, tokenizer: Tokenizer, info: ModelInfo, progress: Progress, detail: str
) -> TextComparison:
    """Compares both models on windows of the text, and returns the mean figures.

    Windows have no token in common but, without a BOS, the first one. Logits of at most ``ROWS`` tokens are in memory.
    ``detail`` is the text for the progress. Raises VerificationError if logits aren't finite.
    """
    engine = Engine(executor, SchedulerConfig(max_requests=1, prefill_tokens=ROWS))
    prefix, ids = split_prefix(tokenizer, evaluation_text())
    window = min(DEFAULT_WINDOW, info.context_length)
    windows = plan_windows(window, window - max(len(prefix), 1), info.context_length, prefix)
    size = windows.size + len(prefix)
    available = windows.count(len(ids))
    chosen = windows_to_compare(info.parameters, size, available)
    divergence = Divergence(Likelihood(), Likelihood())
    done = 0
    for i, (tokens, rows, targets) in enumerate(windows.steps(ids)):
        if i not in chosen:
            continue
        progress(ProgressEvent("verify", done, len(chosen), detail))
        _compare_window(runner, engine, tokens, rows, list(targets), divergence)
        done += 1
    progress(ProgressEvent("verify", done, len(chosen), detail))
    return TextComparison(
        **asdict(comparison(divergence)),
        text=BUILT_IN,
        window=size,
        windows=len(chosen),
        windows_in_text=available,
        perplexity=divergence.model.perplexity,
        source_perplexity=divergence.reference.perplexity,
    )


def _compare_window(
    runner: SourceRunner, engine: Engine, tokens: list[int], rows: slice, targets: list[int], divergence: Divergence
) -> None:
    first, end, _ = rows.indices(len(tokens))
    with runner.logits_of_rows(torch.tensor([tokens])) as reference_of:

        def compare(start: int, rows: Mapping[str, FloatArray]) -> None:
            logits = rows[LOGITS]
            begin, stop = max(start, first), min(start + len(logits), end)
            if begin < stop:
                rows_here, reference = logits[begin - start : stop - start], reference_of(slice(begin, stop))
                check_logits(rows_here, reference)
                divergence.add(rows_here, reference, targets[begin - first : stop - first])

        request = PromptRequest(tokens, (LOGITS,), compare)
        try:
            engine.add_request(request)
            while not request.finished:
                engine.step()
        finally:
            engine.abort(request)


def evaluation_text() -> str:
    """Returns the text that comes with the package."""
    return read_text(BUILT_IN, "text", EVALUATION_TEXT)
