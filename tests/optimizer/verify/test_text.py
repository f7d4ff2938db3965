from __future__ import annotations

from itertools import pairwise

import pytest

from enginewright.optimizer.verify.text import MOST_WINDOWS, why_no_text, windows_to_compare
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("parameters", "window", "available", "count"),
    [
        (134_515_008, 512, 18, 3),  # SmolLM2
        (50_000, 512, 60, MOST_WINDOWS),
        (50_000, 64, 7, 7),
        (1_700_000_000, 512, 18, 1),
        (70_000_000_000, 512, 18, 1),
    ],
)
def test_larger_models_see_less_of_the_text(parameters: int, window: int, available: int, count: int) -> None:
    chosen = windows_to_compare(parameters, window, available)
    assert len(set(chosen)) == count
    assert chosen == sorted(chosen)
    assert chosen[0] == 0
    assert chosen[-1] < available
    steps = [b - a for a, b in pairwise(chosen)]
    assert not steps or max(steps) - min(steps) <= 1  # spread evenly


def info(context: int, vocabulary: int) -> ModelInfo:
    return ModelInfo(name="x", architecture="X", vocab_size=vocabulary, context_length=context)


def test_some_models_have_no_text(tiny_bundle: object) -> None:
    tokenizer = Tokenizer(Bundle.open(str(tiny_bundle)).tokenizer_files())
    assert why_no_text(None, info(512, 259)) == "the model has no tokenizer"
    assert why_no_text(tokenizer, info(63, 259)) == "the context of 63 tokens is too small"
    assert "the model a vocabulary of 200" in str(why_no_text(tokenizer, info(512, 200)))
    assert why_no_text(tokenizer, info(64, 259)) is None
