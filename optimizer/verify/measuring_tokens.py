"""The tokens on which passes are measured: calibration's own, or the package's text, or random ones."""

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
"""More than one: where a model decides (a router) rounding may decide otherwise, but not in all of them."""

LENGTH = 64
"""Tokens of each where precision is lost: a mean KL of 256 of them is known to about a tenth."""

EXACT_LENGTH = 16
"""Tokens of each that are looked at while nothing but rounding may differ: whatever is wrong shows in few of them."""

MOST_LOGITS = 1 << 25
"""The most logits of the source, all together: they are in memory as long as passes are measured."""

SEED = 20261120


@dataclass(frozen=True)
class MeasuringTokens:
    """Token ids, [S] each, and where they are from."""

    sequences: tuple[torch.Tensor, ...]
    origin: str

    @property
    def length(self) -> int:
        """The length of the longest sequence."""
        return max(len(s) for s in self.sequences)


def measuring_tokens(
    calibration: Sequence[torch.Tensor], tokenizer: Tokenizer | None, info: ModelInfo, most: int = LENGTH
) -> MeasuringTokens:
    """Up to SEQUENCES sequences of up to ``most`` tokens, spread over what there is; the same ones at every call.

    Args:
        calibration: token ids of some sequences, [S] each; may be empty. Then it is the package's text, and random
            tokens for a model that has no tokenizer for it.
        tokenizer: the model's.
        info: its context and vocabulary limit their number.
        most: tokens of a sequence.
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
