"""The tokens that a recovery trains on and measures with, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from enginewright.optimizer.calibration.sample import sample_sequences, sampled_origin
from enginewright.optimizer.calibration.text_file import read_sequences
from enginewright.optimizer.capture import CapturedModel
from enginewright.optimizer.measure.source_runner import SourceRunner
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.progress import Progress, ProgressEvent
from enginewright.runtime.text.tokenizer import Tokenizer

from .options import RecoverOptions

_MOST = 1 << 40
"""The most tokens that are read of a text: no limit."""

_LEAST_SHARE = 8
"""The least length of a sequence, as a share of the longest one.

Shorter ones are left out, as they aren't worth a step.
"""


@dataclass(frozen=True)
class Sequences:
    """Token ids, int32 [S] each.

    Attributes:
        training: the sequences to train on.
        held_out: the sequences to measure with.
        origin: the origin of the tokens, in words.
    """

    training: tuple[torch.Tensor, ...]
    held_out: tuple[torch.Tensor, ...]
    origin: str

    @property
    def tokens(self) -> int:
        """The number of tokens of the training sequences."""
        return sum(len(s) for s in self.training)

    @property
    def held_out_tokens(self) -> int:
        """The number of tokens of the held-out sequences."""
        return sum(len(s) for s in self.held_out)

    def batch(self, step: int, options: RecoverOptions) -> list[torch.Tensor]:
        """Returns the sequences of a step; the first step is 0. All sequences come once, then all again in another
        order.

        The result depends on the step and the seed alone, so that a resumed training continues as if it hadn't stopped.
        """
        longest = max(len(s) for s in self.training)
        size = min(len(self.training), max(1, options.batch_tokens // longest))
        batches = len(self.training) // size
        epoch, place = divmod(step, batches)
        generator = torch.Generator().manual_seed((options.seed << 20) + epoch)
        order = torch.randperm(len(self.training), generator=generator)[place * size : (place + 1) * size]
        return [self.training[i] for i in order.tolist()]


def read_or_sample(
    source: str | Path | PreTrainedModel,
    captured: CapturedModel,
    text: str | Path | None,
    options: RecoverOptions,
    progress: Progress,
    keep_bytes: int,
) -> Sequences:
    """Returns the sequences of a text, or sequences that are sampled from the source.

    Args:
        source: the model, to sample from.
        captured: the captured model, with its tokenizer.
        text: a file of text or of JSONL; see ``read_sequences``. None samples from the source.
        options: the options of the recovery.
        progress: called with the stage "tokens".
        keep_bytes: the bytes of weights to keep in memory; see ``SourceRunner``.

    Raises:
        RequestError: the text is invalid, or too small to train on.
        SourceError, UnsupportedModelError: nothing can be sampled from the source.
    """
    info, files = captured.model_info, captured.tokenizer_files
    length = min(options.sequence_length, info.context_length)
    if text is not None:
        progress(ProgressEvent("tokens", 0, 1, str(text)))
        tokenizer = Tokenizer(files) if files is not None and files.tokenizer_json else None
        sequences = read_sequences(Path(text), tokenizer, info.vocab_size, _MOST, length, option="text")
        progress(ProgressEvent("tokens", 1, 1, str(text)))
        return split(sequences, options, f"the text {Path(text).name}")
    model = source if isinstance(source, PreTrainedModel) else Path(source)
    sampled = sample_sequences(
        SourceRunner(model, context_length=info.context_length, keep_bytes=keep_bytes),
        info,
        tokens=options.sampled_tokens,
        sequence_length=length,
        seed=options.seed,
        stage="tokens",
        progress=progress,
    )
    return split(sampled, options, sampled_origin(options.seed))


def split(sequences: Sequence[torch.Tensor], options: RecoverOptions, origin: str) -> Sequences:
    """Divides sequences into those to train on and evenly spread held-out ones. Raises RequestError if there are too
    few for a step.
    """
    longest = max(len(s) for s in sequences)
    usable = [s for s in sequences if len(s) * _LEAST_SHARE >= longest and len(s) > 1]
    count = max(1, round(len(usable) * options.validation))
    held = {i * len(usable) // count for i in range(count)}
    training = tuple(s for i, s in enumerate(usable) if i not in held)
    tokens = sum(len(s) for s in training)
    if tokens < options.batch_tokens:
        raise RequestError(
            f"text: {origin} is too small to recover with: {tokens:,} tokens are left to train on, fewer than the "
            f"{options.batch_tokens:,} of a step",
            hint="Pass a longer text (a hundred times a step's tokens is a start), or fewer batch_tokens.",
        )
    return Sequences(training, tuple(s for i, s in enumerate(usable) if i in held), origin)
