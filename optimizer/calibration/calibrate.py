"""``calibrate``: makes token sequences from a file or the model itself, and reports their coverage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch

from enginewright.optimizer.capture import CapturedModel
from enginewright.optimizer.capture.model_source import AnySource
from enginewright.optimizer.measure.source_runner import KEEP_BYTES, SourceRunner
from enginewright.optimizer.pipeline.pass_context import needs_tokens
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.sections import CalibrationSection
from enginewright.optimizer.shared.export_records import CalibrationReport, Coverage
from enginewright.passes.framework.base import Metric
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.progress import Progress, ProgressEvent
from enginewright.runtime.text.tokenizer import Tokenizer

from .coverage import measure_coverage
from .sample import sample_sequences, sampled_origin
from .text_file import read_sequences

TEXT = "calibration_text.txt"
"""The file with the package's text for calibration. It shares no line with the text for measurements."""

TEXT_ORIGIN = "the package's calibration text"


@dataclass(frozen=True)
class Calibration:
    """Token sequences for passes and measurements.

    Attributes:
        sequences: int32 [S] each, S at most the recipe's sequence_length and the model's context.
        origin: the file, or a description of the sampling; for the report.
        coverage: the parts of the model that they exercise.
    """

    sequences: tuple[torch.Tensor, ...]
    origin: str
    coverage: Coverage


def calibrate(
    source: AnySource,
    info: ModelInfo,
    section: CalibrationSection,
    *,
    file: str | Path | None,
    tokenizer: Tokenizer | None,
    progress: Progress,
    keep_bytes: int = KEEP_BYTES,
    cache_bytes: int | None = None,
) -> Calibration:
    """Returns token sequences from ``file``, or from the recipe's source of tokens if there is no file.

    Args:
        source: the model.
        info: the runtime's description of the model.
        section: the number of tokens, the length of sequences, and their source. If the model's tokenizer can't read
            the package's text, tokens are sampled from the model. A model that doesn't generate text gets the package's
            text, or else random tokens.
        file: text or JSONL; see ``read_sequences``.
        tokenizer: the model's tokenizer, if it has one.
        progress: called with the stage "calibration".
        keep_bytes: during sampling, weights stay in memory if they have at most this many bytes as float32.
        cache_bytes: maximum bytes of keys and values during sampling.

    Raises:
        RequestError: the file is invalid; see ``read_sequences``.
        SourceError, UnsupportedModelError: the model can't be sampled from.
    """
    length = min(section.sequence_length, info.context_length)
    if file is not None:
        progress(ProgressEvent("calibration", 0, 1, str(file)))
        sequences = read_sequences(Path(file), tokenizer, info.vocab_size, section.tokens, length)
        progress(ProgressEvent("calibration", 1, 1, str(file)))
        return _calibration(sequences, Path(file).name, info)
    pooled = info.pooling is not None  # then nothing can be sampled
    if (pooled or section.source == "text") and (known := _text(tokenizer, info, section.tokens, length)) is not None:
        return Calibration(known, TEXT_ORIGIN, measure_coverage(known, info.vocab_size, few=True))
    if pooled:
        generator = torch.Generator().manual_seed(section.seed)
        count = -(-section.tokens // length)
        drawn = torch.randint(info.vocab_size, (count, length), generator=generator, dtype=torch.int32)
        return _calibration(tuple(drawn), "random tokens, as the model has no tokenizer that reads a text", info)
    origin = sampled_origin(section.seed)
    progress(ProgressEvent("calibration", 0, 1, origin))
    sequences = sample_sequences(
        SourceRunner(source, context_length=info.context_length, keep_bytes=keep_bytes),
        info,
        tokens=section.tokens,
        sequence_length=length,
        seed=section.seed,
        stage="calibration",
        progress=progress,
        cache_bytes=cache_bytes,
    )
    return _calibration(sequences, origin, info)


def _text(tokenizer: Tokenizer | None, info: ModelInfo, tokens: int, length: int) -> tuple[torch.Tensor, ...] | None:
    """Tokenizes the calibration text of this package: sequences of at most ``length`` tokens, at most ``tokens`` in
    all.

    Returns None without a tokenizer, or if its token ids don't fit the model.
    """
    with resources.as_file(resources.files(__package__) / TEXT) as file:
        try:
            return read_sequences(file, tokenizer, info.vocab_size, tokens, length)
        except RequestError:  # without a tokenizer, or with one of another vocabulary
            return None


def _calibration(sequences: tuple[torch.Tensor, ...], origin: str, info: ModelInfo) -> Calibration:
    return Calibration(sequences, origin, measure_coverage(sequences, info.vocab_size))


def tokens_of_recipe(
    source: AnySource,
    captured: CapturedModel,
    recipe: Recipe,
    targets: Sequence[str],
    file: str | Path | None,
    progress: Progress,
) -> tuple[torch.Tensor, ...]:
    """Returns the tokens of ``calibrate`` for the passes of the recipe and of ``targets``; empty if no pass
    needs any.
    """
    if not needs_tokens(recipe, targets):
        return ()
    files = captured.tokenizer_files
    tokenizer = Tokenizer(files) if files is not None and files.tokenizer_json else None
    calibration = calibrate(
        source, captured.model_info, recipe.calibration, file=file, tokenizer=tokenizer, progress=progress
    )
    return calibration.sequences


def calibration_report(
    calibration: Calibration | None, vocab_size: int, metrics: Iterable[Metric]
) -> CalibrationReport | None:
    """Returns the report, after passes have measured their ``metrics``; None if nothing was calibrated."""
    if calibration is None:
        return None
    return CalibrationReport(
        calibration.origin,
        measure_coverage(calibration.sequences, vocab_size, metrics, few=calibration.origin == TEXT_ORIGIN),
    )
