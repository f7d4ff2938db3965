from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from enginewright.optimizer.verify.measuring_tokens import MOST_LOGITS, measuring_tokens
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def info(tiny_bundle: Path) -> ModelInfo:
    return Bundle.open(tiny_bundle).model


def test_calibration_is_taken_first_and_spread(info: ModelInfo, tiny_bundle: Path) -> None:
    calibration = [torch.full((n,), i, dtype=torch.int32) for i, n in enumerate([100, 3, 100, 100, 30, 100, 100, 100])]
    tokens = measuring_tokens(calibration, Tokenizer(Bundle.open(tiny_bundle).tokenizer_files()), info)
    assert tokens.origin == "calibration tokens"
    assert [int(s[0]) for s in tokens.sequences] == [0, 2, 4, 6]  # the one of three tokens shows too little
    assert [len(s) for s in tokens.sequences] == [64, 64, 30, 64]
    assert {s.dtype for s in tokens.sequences} == {torch.int64}
    assert len(measuring_tokens([torch.arange(3)], None, info).sequences[0]) == 3  # better than nothing


@pytest.mark.parametrize("most", [64, 16])
def test_text_where_there_is_a_tokenizer(most: int, info: ModelInfo, tiny_bundle: Path) -> None:
    tokenizer = Tokenizer(Bundle.open(tiny_bundle).tokenizer_files())
    tokens = measuring_tokens((), tokenizer, info, most)
    assert tokens.origin == "the package's text"
    assert [len(s) for s in tokens.sequences] == [most] * 4
    assert len({tokenizer.decode(s.tolist()) for s in tokens.sequences}) == 4
    again = measuring_tokens((), tokenizer, info, most)
    assert all(torch.equal(a, b) for a, b in zip(tokens.sequences, again.sequences, strict=True))


def test_random_tokens_otherwise(info: ModelInfo) -> None:
    tokens = measuring_tokens((), None, info)
    assert (tokens.origin, tokens.length, len(tokens.sequences)) == ("random tokens", 64, 4)
    assert max(int(s.max()) for s in tokens.sequences) < info.vocab_size


@pytest.mark.parametrize(("context", "vocabulary", "length"), [(5, 300, 5), (4096, MOST_LOGITS // 40, 10)])
def test_no_more_than_there_is_room_for(context: int, vocabulary: int, length: int, info: ModelInfo) -> None:
    small = replace(info, context_length=context, vocab_size=vocabulary)
    assert measuring_tokens((), None, small).length == length
