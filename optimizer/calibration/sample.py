"""Samples calibration sequences from the model itself.

A model's own samples resemble its training data, in the same proportions (Liu et al., "LLM-QAT", 2023,
https://arxiv.org/abs/2305.17888), and need no text. They are drawn at temperature 1 by transformers' own forward pass,
so that they depend only on the model and the seed. A step continues from the model's cache; for a model without a cache
that transformers can continue from, every step computes all tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from enginewright.optimizer.measure.source_runner import SourceRunner, weight_bytes
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.progress import Progress, ProgressEvent

MOST_READ = 128 << 30
"""The most bytes of weights, as float32, that sampling may read in total. Each step reads all weights."""

SHORTEST = 8
"""The fewest tokens of a sequence, for models of any size."""

LONGEST_UNCACHED = 64
"""The most tokens of a sequence of a model without a cache, for which work grows with the square of the length."""

MOST_AT_A_TIME = 64
"""The most sequences that are sampled together, because their caches are in memory."""


@dataclass(frozen=True)
class _Cache:
    """A cache of transformers.

    Attributes:
        name: the argument of the model's forward function that has the cache, and the field of its result.
        token_bytes: bytes of the keys and values of a token.
        state_bytes: bytes of the recurrent states of a sequence.
    """

    name: str
    token_bytes: int
    state_bytes: int


def sampled_origin(seed: int) -> str:
    """Returns the description, for reports and progress, of sequences that are sampled with ``seed``."""
    return f"sampled from the model, seed {seed}"


def sample_sequences(
    runner: SourceRunner,
    info: ModelInfo,
    *,
    tokens: int,
    sequence_length: int,
    seed: int,
    stage: str,
    progress: Progress,
    cache_bytes: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Draws about ``tokens`` token ids in sequences of ``sequence_length``, int32 [S] each.

    Every sequence begins with the BOS, if the model has one. In every second one (without a BOS, in all) a token drawn
    uniformly from the vocabulary is next, for variety. All other tokens are drawn from the model's distribution, also
    after an EOS.

    If the runner doesn't keep the model's weights, each step reads all of them, which is slow. Then the sequences are
    shorter, so that at most MOST_READ bytes are read in all, and more of them are drawn at the same time. Sequences of
    a model without a cache have at most LONGEST_UNCACHED tokens.

    Args:
        stage: the stage of the progress events, which count tokens.
        cache_bytes: maximum bytes of the caches of sequences drawn together; None for no limit.

    Raises UnsupportedModelError if the model's logits aren't finite.
    """
    size = weight_bytes(runner.model)
    large = not runner.keeps_weights
    affordable = MOST_READ // max(size, 1) if large else sequence_length
    cache = _cache_of(runner.model)
    longest = min(sequence_length, affordable, info.context_length, sequence_length if cache else LONGEST_UNCACHED)
    length = max(longest, min(SHORTEST, info.context_length))
    count = max(1, -(-tokens // length))
    at_a_time = count if large else MOST_AT_A_TIME
    if cache and cache_bytes is not None:
        fitting = max(1, cache_bytes // max(1, length * cache.token_bytes + cache.state_bytes))
        at_a_time = min(at_a_time, fitting)
        if large:  # a second round would read all weights again: fewer sequences do
            count = min(count, fitting)
    how = sampled_origin(seed) + ("" if cache else ", slowly: transformers has no cache for it")
    generator = torch.Generator().manual_seed(seed)
    sequences: list[torch.Tensor] = []
    while len(sequences) < count:
        numbers = range(len(sequences), min(len(sequences) + at_a_time, count))
        columns = []
        for column in _grow(runner.model, cache, _first_tokens(numbers, info, generator), length, generator):
            columns.append(column)
            done = len(sequences) * length + len(columns) * len(numbers)
            progress(ProgressEvent(stage, done, count * length, how))
        sequences.extend(torch.stack(columns, 1).to(torch.int32))
    return tuple(sequences)


def _cache_of(model: Any) -> _Cache | None:
    """Returns the cache that a model keeps, or None if transformers can't continue from it, as two steps show.

    transformers raises a ValueError for these: it doesn't know the length of a cache without a layer that attends, and
    the states of xLSTM have another shape than its second step expects.
    """
    token = torch.zeros((1, 1), dtype=torch.long)
    try:
        with torch.inference_mode():
            out = model(input_ids=token, use_cache=True)
            name = next((n for n in ("past_key_values", "cache_params") if getattr(out, n, None) is not None), None)
            if name is None:
                return None
            past = getattr(out, name)
            fields = [vars(layer) for layer in getattr(past, "layers", ())]
            whole = _tensor_bytes(fields)
            of_token = _tensor_bytes([(layer.get("keys"), layer.get("values")) for layer in fields])
            model(input_ids=token, use_cache=True, **{name: past})
    except ValueError:
        return None
    return _Cache(name, of_token, whole - of_token)


def _tensor_bytes(tree: Any) -> int:
    """Returns the bytes of all tensors in lists, tuples and dictionaries."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(tree) if isinstance(t, torch.Tensor))


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
    model: Any, cache: _Cache | None, starts: Sequence[Sequence[int]], length: int, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """Yields the tokens [B] at each position in turn: those of ``starts``, then drawn ones."""
    past, logits = None, torch.empty(0)
    grown: list[torch.Tensor] = []
    for at in range(length):
        tokens = torch.tensor([s[at] if at < len(s) else -1 for s in starts])
        if (tokens < 0).any():
            tokens = torch.where(tokens < 0, _draw(logits, generator), tokens)
        grown.append(tokens)
        yield tokens
        if at + 1 < length:
            with torch.inference_mode():
                if cache:
                    out = model(input_ids=tokens[:, None], use_cache=True, **{cache.name: past})
                    past = getattr(out, cache.name)
                else:
                    out = model(input_ids=torch.stack(grown, 1), use_cache=False)
            logits = out.logits[:, -1].float()


def _draw(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draws a token from each row of logits at temperature 1: [B, V] -> [B]."""
    if not torch.isfinite(logits).all():
        raise UnsupportedModelError(
            "calibration: the model's logits are not finite, so nothing can be sampled from it",
            hint="The weights may be damaged.",
        )
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
