from __future__ import annotations

import pytest
import torch

from enginewright.optimizer.calibration.coverage import FEW_TOKENS, measure_coverage
from enginewright.passes.framework.base import Metric
from enginewright.passes.quantization.apply_gptq import LARGEST_INPUT, TOKENS_USED


def sequences(tokens: int, distinct: int) -> tuple[torch.Tensor, ...]:
    return (torch.arange(tokens // 2) % distinct, torch.arange(tokens - tokens // 2) % distinct)


@pytest.mark.parametrize(("tokens", "distinct", "vocabulary"), [(FEW_TOKENS, 8, 256), (5000, 300, 49152)])
def test_enough_is_no_reason_to_warn(tokens: int, distinct: int, vocabulary: int) -> None:
    coverage = measure_coverage(sequences(tokens, distinct), vocabulary)
    assert (coverage.sequences, coverage.tokens, coverage.distinct_tokens) == (2, tokens, distinct)
    assert coverage.vocabulary_share == distinct / vocabulary
    assert coverage.warnings == ()


def test_too_few_tokens_and_too_few_different_ones_warn() -> None:
    few = measure_coverage(sequences(FEW_TOKENS - 1, 300), 30000).warnings
    assert len(few) == 1
    assert "2,047 tokens" in few[0]
    same = measure_coverage(sequences(4096, 100), 49152).warnings
    assert len(same) == 1
    assert "100 different tokens" in same[0]


def test_ranges_come_from_passes() -> None:
    metrics = [Metric("layers.0", LARGEST_INPUT, 3.5), Metric("layers.0", "error", 1.0), Metric("x", LARGEST_INPUT, 0)]
    coverage = measure_coverage(sequences(4096, 100), 256, metrics)
    assert [(r.where, r.largest) for r in coverage.ranges] == [("layers.0", 3.5), ("x", 0)]
    assert ["x" in w and "zeros" in w for w in coverage.warnings] == [True]


def test_tokens_without_room_are_said() -> None:
    tokens = sequences(4096, 100)
    assert measure_coverage(tokens, 256, [Metric("calibration", TOKENS_USED, 4096)]).warnings == ()
    (warning,) = measure_coverage(tokens, 256, [Metric("calibration", TOKENS_USED, 1024)]).warnings
    assert "1,024 of 4,096" in warning
