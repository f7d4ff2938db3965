"""Calibration without a file: sequences that the model itself writes.

A model's own samples are like what it was trained on, in its own proportions (Liu et al., "LLM-QAT", 2023,
https://arxiv.org/abs/2305.17888), and there is no text to find. They are drawn at temperature 1 by transformers' own
forward pass, so that they depend on the model and the seed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from enginewright.optimizer.measure.source_runner import KEEP_BYTES, SourceRunner, weight_bytes
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import UnsupportedModelError

MOST_READ = 128 << 30
"""Bytes of weights, as float32, that sampling may go through: a step reads them all."""

SHORTEST = 8
"""A sequence has this many tokens, however large the model is."""

MOST_AT_A_TIME = 64
"""Sequences that grow together: their caches are in memory."""


def sample_sequences(
    runner: SourceRunner,
    info: ModelInfo,
    *,
    tokens: int,
    sequence_length: int,
    seed: int,
    progress: Callable[[int, int], None],
    keep_bytes: int = KEEP_BYTES,
    cache_bytes: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """About ``tokens`` token ids in sequences of ``sequence_length``, int32 [S] each.

    Every sequence begins with the BOS, if the model has one; in every second one, and without a BOS in all, a token
    drawn uniformly from the vocabulary comes next, which spreads them. All other tokens are drawn from the model's own
    distribution. What comes after an EOS is what the model writes then.

    A step of a model whose weights take more than ``keep_bytes`` takes long, as it reads them all: the sequences are
    then as short as keeps that below MOST_READ in all, and the more of them are drawn, at the same time.

    Args:
        progress: called with how many tokens of how many are there.
        keep_bytes: the runner's.
        cache_bytes: most that the keys and values of sequences that are drawn together may take; None doesn't say.

    Raises UnsupportedModelError if the model has no cache or gives no finite logits.
    """
    size = weight_bytes(runner.model)
    large = size > keep_bytes
    affordable = MOST_READ // max(size, 1) if large else sequence_length
    length = max(min(sequence_length, affordable, info.context_length), min(SHORTEST, info.context_length))
    count = max(1, -(-tokens // length))
    at_a_time = count if large else MOST_AT_A_TIME
    if cache_bytes is not None:
        fitting = max(1, cache_bytes // (length * _cache_bytes_per_token(runner.model)))
        at_a_time = min(at_a_time, fitting)
        if large:  # a second round would read all weights again: fewer sequences do
            count = min(count, fitting)
    generator = torch.Generator().manual_seed(seed)
    sequences: list[torch.Tensor] = []
    while len(sequences) < count:
        numbers = range(len(sequences), min(len(sequences) + at_a_time, count))
        columns = []
        for column in _grow(runner.model, _first_tokens(numbers, info, generator), length, generator):
            columns.append(column)
            progress(len(sequences) * length + len(columns) * len(numbers), count * length)
        sequences.extend(torch.stack(columns, 1).to(torch.int32))
    return tuple(sequences)


def _cache_bytes_per_token(model: Any) -> int:
    """Bytes of keys and values, as the model itself makes them of one token."""
    with torch.inference_mode():
        out = model(input_ids=torch.zeros((1, 1), dtype=torch.long), use_cache=True)
    layers = getattr(getattr(out, "past_key_values", None), "layers", ())
    attending = [layer for layer in layers if getattr(layer, "keys", None) is not None]
    tensors: list[torch.Tensor] = [t for layer in attending for t in (layer.keys, layer.values)]
    return max(1, sum(t.numel() * t.element_size() for t in tensors))


def _first_tokens(numbers: range, info: ModelInfo, generator: torch.Generator) -> list[list[int]]:
    starts = []
    for number in numbers:
        drawn = int(torch.randint(info.vocab_size, (1,), generator=generator))
        if info.bos_token_id is None or info.bos_token_id >= info.vocab_size:
            starts.append([drawn])
        else:
            starts.append([info.bos_token_id, drawn] if number % 2 else [info.bos_token_id])
    return starts


def _grow(
    model: Any, starts: Sequence[Sequence[int]], length: int, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """The tokens [B] at each place in turn: the starts', then what continues them."""
    past = None
    logits = torch.empty(0)
    for at in range(length):
        tokens = torch.tensor([s[at] if at < len(s) else -1 for s in starts])
        if (tokens < 0).any():
            tokens = torch.where(tokens < 0, _draw(logits, generator), tokens)
        yield tokens
        if at + 1 < length:
            try:
                with torch.inference_mode():
                    out = model(input_ids=tokens[:, None], past_key_values=past, use_cache=True)
            except ValueError as e:  # of a cache without a layer that attends, for one
                raise UnsupportedModelError(
                    f"{type(model).__name__}: nothing can be sampled from it with its cache: {e}",
                    hint="Pass a calibration text.",
                ) from e
            logits, past = out.logits[:, -1].float(), getattr(out, "past_key_values", None)
            if past is None:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: it keeps no cache, so nothing can be sampled from it in reasonable time",
                    hint="Pass a calibration text.",
                )


def _draw(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """[B, V] -> [B], at temperature 1."""
    if not torch.isfinite(logits).all():
        raise UnsupportedModelError(
            "calibration: the model's logits are not finite, so nothing can be sampled from it",
            hint="The weights may be damaged.",
        )
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
