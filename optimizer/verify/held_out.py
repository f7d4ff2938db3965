"""Divides tokens for a search within a budget: some to measure candidates with, others to check the choice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from enginewright.optimizer.capture import CapturedModel
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.text.tokenizer import Tokenizer

from .measuring_tokens import MeasuringTokens, measuring_tokens
from .random_tokens import random_sequences
from .verify import SEEDS


def held_out(
    captured: CapturedModel, sequences: Sequence[torch.Tensor], section: str
) -> tuple[tuple[torch.Tensor, ...], list[MeasuringTokens]]:
    """Returns every second sequence, to measure candidates with, and the tokens on which the choice is checked.

    The choice is checked on the other sequences, on the package's text, and on the random tokens of the bundle's
    verification, which applies the budget to all of them.

    Args:
        captured: the captured model.
        sequences: token ids of the calibration, [S] each, at least two sequences.
        section: name of the recipe's section, for the error.

    Raises RequestError if there are too few sequences.
    """
    if len(sequences) < 2:
        raise RequestError(
            f"calibration: [{section}] measures with one half of the sequences and checks with the other: "
            "there is only one",
            hint="Pass a longer text, or set a smaller sequence_length in [calibration].",
        )
    files, info = captured.tokenizer_files, captured.model_info
    tokenizer = Tokenizer(files) if files is not None and files.tokenizer_json else None
    checks = [
        measuring_tokens(sequences[1::2], None, info),
        measuring_tokens((), tokenizer, info),
        MeasuringTokens(tuple(torch.from_numpy(s) for s in random_sequences(info, SEEDS[0])[1]), "random tokens"),
    ]
    return tuple(sequences[::2]), checks
