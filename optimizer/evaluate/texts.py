"""``evaluate_texts``: compares a bundle's vectors, scores or classes of texts with those of another model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enginewright.optimizer.measure.text_metrics import measure_texts
from enginewright.optimizer.measure.text_results import BATCH, LONGEST, token_texts
from enginewright.optimizer.measure.texts import BUILT_IN, EVALUATION_TEXT, read_text
from enginewright.optimizer.measure.windows import spread
from enginewright.runtime.shared.contracts import FloatArray, PooledTask
from enginewright.runtime.shared.errors import EnginewrightError, RequestError
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

from .models import OpenOptions
from .text_models import BundleTexts, TextModel, open_text_reference

MOST_TEXTS = 2000
"""The most texts that are compared: the time for metrics of pairs grows with the square."""


@dataclass(frozen=True)
class TextsReport:
    """The result of ``evaluate_texts``.

    Attributes:
        bundle, against: the two models, as they were named.
        model: the bundle's model.
        task: the task of both.
        source: the file of the texts, or BUILT_IN.
        texts, texts_in_file: the number of texts compared, and of all texts in the file.
        tokens: the number of their tokens.
        metrics: the metrics by name, see measure/text_metrics.py; None for one that needs more texts.
        seconds: the time that it took.
    """

    bundle: str
    model: str
    task: PooledTask
    against: str
    source: str
    texts: int
    texts_in_file: int
    tokens: int
    metrics: dict[str, float | None]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for ``--json``."""
        return asdict(self)


def evaluate_texts(
    bundle: str | Path,
    against: str | Path,
    *,
    text: str | Path = BUILT_IN,
    lines: Sequence[str] | None = None,
    texts: int | None = None,
    options: OpenOptions = OpenOptions(),
    progress: Progress | None = None,
) -> TextsReport:
    """Compares a bundle that computes whole texts with another model, on the lines of a file.

    Both models get the tokens of the bundle's tokenizer, without a prompt. Texts beyond the shorter context are cut.

    Args:
        bundle: the bundle, which the runtime runs without torch.
        against: a bundle to compare with, or a Hugging Face directory or Hub id; these need the export extra.
        text: a UTF-8 file with a text in each line; BUILT_IN is the package's text.
        lines: the texts, if the file ``text`` was read before; None to read its lines.
        texts: the most texts, spread over the file; None for all, up to MOST_TEXTS.
        options: how the bundle is opened.
        progress: called after each few texts.

    Raises:
        RequestError: the file is invalid, or the two models have other tasks, tokenizers or sizes of results.
        BundleError, SourceError, UnsupportedModelError, CapacityError, MissingDependencyError: see these classes.
        EnginewrightError: a model's results are not finite.
    """
    start = time.perf_counter()
    on_progress = progress or silent
    written = read_text(text, "text", EVALUATION_TEXT).splitlines() if lines is None else lines
    with closing(BundleTexts(bundle, options)) as model:
        on_progress(ProgressEvent("load", 0, 1, str(against)))
        reference = open_text_reference(
            against, model.section, threads=options.threads, trust=options.trust, progress=on_progress
        )
        with closing(reference):
            on_progress(ProgressEvent("load", 1, 1, reference.name))
            task = _same_task(model, reference)
            every = _tokens(model, reference, written, text)
            chosen = [every[i] for i in spread(min(texts or MOST_TEXTS, MOST_TEXTS), len(every))]
            results: list[FloatArray] = []
            expected: list[FloatArray] = []
            for at in range(0, len(chosen), BATCH):
                some = chosen[at : at + BATCH]
                results += _finite(model, some)
                expected += _finite(reference, some)
                if at == 0:
                    _check_sizes(model, reference, results[0].shape[-1], expected[0].shape[-1])
                on_progress(ProgressEvent("texts", at + len(some), len(chosen), ""))
            return TextsReport(
                bundle=str(bundle),
                model=model.name,
                task=task,
                against=reference.path,
                source=str(text),
                texts=len(chosen),
                texts_in_file=len(every),
                tokens=sum(map(len, chosen)),
                metrics=measure_texts(task, results, expected),
                seconds=round(time.perf_counter() - start, 3),
            )


def _same_task(model: BundleTexts, reference: TextModel) -> PooledTask:
    """Returns the task that both models have. Raises RequestError if they have different ones."""
    if model.task is None or model.task != reference.task:
        kinds = [one.task or "text generation" for one in (reference, model)]
        raise RequestError(
            f"against: {reference.path} is a model for {kinds[0]}, {model.path} for {kinds[1]}",
            hint="Compare models of one kind.",
        )
    return model.task


def _check_sizes(model: BundleTexts, reference: TextModel, size: int, expected: int) -> None:
    """Raises RequestError if the results of the two models for a text have different sizes:

    ``size`` and ``expected``.
    """
    if size != expected:
        raise RequestError(
            f"against: {reference.path} gives {expected} numbers for a text, {model.path} {size}",
            hint="Compare models of the same size.",
        )


def _tokens(model: BundleTexts, reference: TextModel, written: Sequence[str], text: str | Path) -> list[list[int]]:
    """Returns the tokens of each line. Raises RequestError if the tokenizers differ, or there are no tokens."""
    tokenizer = model.tokenizer or reference.tokenizer
    if tokenizer is None:
        raise RequestError(f"text: neither {model.path} nor {reference.path} has a tokenizer", hint="Add one.")
    most = min(model.context_length, reference.context_length)
    if text == BUILT_IN:
        most = min(most, LONGEST)
    every = token_texts(written, tokenizer, most)
    if reference.tokenizer is not None and token_texts(written, reference.tokenizer, most) != every:
        raise RequestError(
            f"against: {reference.path} has another tokenizer than {model.path}: they make different tokens of {text}",
            hint="Compare models that share their tokenizer.",
        )
    if not every:
        raise RequestError(f"text: {text} has no tokens", hint="Pass a file with a text in each line.")
    return every


def _finite(model: TextModel, texts: Sequence[Sequence[int]]) -> list[FloatArray]:
    """Returns the results of texts. Raises EnginewrightError if some are NaN or infinite."""
    results = model.results(texts)
    if not all(np.isfinite(rows).all() for rows in results):
        raise EnginewrightError(
            f"{model.path}: the numbers of a text are not finite",
            hint="The model's weights may be damaged, or too large for the recipe's number format.",
        )
    return results
