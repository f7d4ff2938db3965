"""Measures how much of a model some calibration tokens exercise, and warns of gaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from enginewright.optimizer.shared.export_records import Coverage, InputRange
from enginewright.passes.framework.base import Metric
from enginewright.passes.quantization.apply_gptq import LARGEST_INPUT, TOKENS_USED

FEW_TOKENS = 2048
"""The number of tokens below which the statistics of wide layers are unreliable."""

SMALL_SHARE = 0.005
"""The share of the vocabulary below which a warning is given: a single repetitive text has less."""


def measure_coverage(
    sequences: Sequence[torch.Tensor], vocab_size: int, metrics: Iterable[Metric] = (), *, few: bool = False
) -> Coverage:
    """Returns the coverage of a model by calibration sequences, with warnings about gaps.

    Args:
        sequences: token ids, [S] each.
        vocab_size: the number of tokens of the vocabulary.
        metrics: measurements of passes; those named LARGEST_INPUT become the ranges.
        few: True if few tokens suffice, as for the magnitudes that smoothing uses.
    """
    tokens = sum(len(s) for s in sequences)
    distinct = len(torch.cat(list(sequences)).unique())
    share = distinct / vocab_size
    measured = tuple(metrics)
    ranges = tuple(InputRange(f.where, f.value) for f in measured if f.name == LARGEST_INPUT)
    warnings = []
    if tokens < FEW_TOKENS and not few:
        warnings.append(
            f"calibration has {tokens:,} tokens, and fewer than {FEW_TOKENS:,} say little of wide layers: "
            "give it a longer text"
        )
    if share < SMALL_SHARE and not few:
        warnings.append(
            f"calibration has {distinct:,} different tokens, {share:.2%} of the vocabulary, where {SMALL_SHARE:.1%} is "
            "the least that a varied text has: give it one"
        )
    if (used := min((f.value for f in measured if f.name == TOKENS_USED), default=tokens)) < tokens:
        warnings.append(f"the memory that there may be had room for {used:,.0f} of {tokens:,} calibration tokens")
    if silent := [r.where for r in ranges if r.largest == 0]:
        warnings.append(
            f"calibration shows {len(silent)} linears nothing but zeros, such as {silent[0]}: give it another text"
        )
    return Coverage(len(sequences), tokens, distinct, share, tuple(warnings), ranges)
