"""The tokens that two sides are compared on: given ones, a text's, or random ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from enginewright.plugins.shared.contracts import ModelInfo
from enginewright.plugins.shared.errors import RequestError
from enginewright.runtime.text.tokenizer import Tokenizer

LENGTHS = (37, 23)
"""Of random sequences. The first goes into a second block of keys and values; both are sizes that models don't have."""

LONGEST = 512
"""Tokens in all: every value of the model is in memory for each."""


def choose_tokens(
    info: ModelInfo,
    *,
    tokens: Sequence[Sequence[int]],
    texts: Sequence[str],
    seed: int,
    tokenizer: Tokenizer | None,
) -> list[torch.Tensor]:
    """Sequences of token ids, int32 [S] each: ``tokens`` and ``texts``, or random ones if there are none.

    Raises RequestError for ids that the model doesn't have, an empty sequence, one that is too long, and a text where
    there is no tokenizer.
    """
    given = [list(ids) for ids in tokens]
    if texts and tokenizer is None:
        raise RequestError("a text is given, but the model has no tokenizer", hint="Give token ids with --tokens.")
    for text in texts:
        assert tokenizer is not None
        given.append(list(tokenizer.encode(text)))
    if not given:
        generator = np.random.default_rng(seed)
        lengths = [min(length, info.context_length) for length in LENGTHS]
        given = [generator.integers(0, info.vocab_size, length).tolist() for length in lengths]
    for ids in given:
        if not ids:
            raise RequestError("a sequence to compare on has no tokens", hint="Give at least one token.")
        if len(ids) > info.context_length:
            raise RequestError(
                f"a sequence to compare on has {len(ids):,} tokens, the model takes {info.context_length:,}",
                hint="Give a shorter one.",
            )
        if wrong := [i for i in ids if not 0 <= i < info.vocab_size]:
            raise RequestError(
                f"token {wrong[0]} is not one of the model's {info.vocab_size:,}",
                hint=f"Token ids are 0 to {info.vocab_size - 1}.",
            )
    if (total := sum(len(ids) for ids in given)) > LONGEST:
        raise RequestError(
            f"{total:,} tokens to compare on are more than {LONGEST}, of which every value is kept",
            hint="Give fewer, or shorter, sequences.",
        )
    return [torch.tensor(ids, dtype=torch.int32) for ids in given]
