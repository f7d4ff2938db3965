"""Chooses the tokens on which passes are measured: the calibration's, the package's text, or random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from enginewright.optimizer.measure.windows import split_prefix
from enginewright.passes.framework.token_sequences import spread
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.text.tokenizer import Tokenizer

from .text import evaluation_text, why_no_text

SEQUENCES = 4
"""The number of sequences. Rounding may change a router's choice in one of them, but hardly in all."""

LENGTH = 64
"""The tokens of a sequence after a loss of precision: the mean KL of 256 tokens is known to about a tenth."""

EXACT_LENGTH = 16
"""The tokens of a sequence as long as only rounding may differ. A few tokens are enough to show a fault."""

MOST_LOGITS = 1 << 25
"""The most logits of the source for all sequences together. They stay in memory while passes are measured."""

SEED = 20261120


@dataclass(frozen=True)
class MeasuringTokens:
    """Sequences of token ids, [S] each, and a description of their origin."""

    sequences: tuple[torch.Tensor, ...]
    origin: str

    @property
    def length(self) -> int:
        """Returns the number of tokens in the longest sequence."""
        return max(len(s) for s in self.sequences)


def measuring_tokens(
    calibration: Sequence[torch.Tensor], tokenizer: Tokenizer | None, info: ModelInfo, most: int = LENGTH
) -> MeasuringTokens:
    """Returns up to SEQUENCES sequences of up to ``most`` tokens; equal arguments give equal sequences.

    Args:
        calibration: token ids of some sequences, [S] each, of which some are chosen, evenly spaced. If there are none,
            the package's text is used, or random tokens if the model has no tokenizer for the text.
        tokenizer: tokenizer of the model; None if it has none.
        info: the model's context and vocabulary, which limit the number of tokens.
        most: the most tokens of a sequence.
    """
    length = max(1, min(most, info.context_length, MOST_LOGITS // (SEQUENCES * info.vocab_size)))
    if calibration:
        enough = [s for s in calibration if len(s) >= min(length, EXACT_LENGTH)] or calibration
        count = min(SEQUENCES, len(enough))
        chosen = [sequence[:length] for sequence in spread(enough, count)]
        return MeasuringTokens(tuple(s.long() for s in chosen), "calibration tokens")
    if tokenizer is not None and why_no_text(tokenizer, info) is None:
        prefix, ids = split_prefix(tokenizer, evaluation_text())
        room = max(length - len(prefix), 1)
        starts = [i * max(len(ids) - room, 0) // SEQUENCES for i in range(SEQUENCES)]
        windows = [torch.tensor([*prefix, *ids[s : s + room]][:length]) for s in starts]
        return MeasuringTokens(tuple(windows), "the package's text")
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(info.vocab_size, (SEQUENCES, length), generator=generator)
    return MeasuringTokens(tuple(drawn), "random tokens")
