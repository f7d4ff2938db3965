"""Planted keys: the text has the keys far before their questions, and answers are scored by their tokens."""

from __future__ import annotations

import numpy as np
import pytest
from needles import CITIES, plant

TEXT = list(range(1000, 4000))


def _encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_every_answer_is_in_the_text_before_the_questions() -> None:
    needles = plant(_encode, TEXT, 2500)
    assert len(needles.ids) == 2500 and len(needles.keys) == len(CITIES)
    np.testing.assert_array_equal(np.array(needles.ids)[needles.places + 1], needles.tokens)
    text = "".join(map(chr, needles.ids))
    questions = int(needles.places.min())
    for answer in needles.keys:
        at = int(needles.places[needles.owners == answer].min())
        key = text[at + 1 : at + 7]
        line = text[text.rindex("\n", 0, at) : at + 7]
        assert text.count(line) == 2 and text.index(line) < 0.8 * questions, key
    others = [i for i in needles.ids if i >= 1000]
    assert others == TEXT[: len(others)]


def test_answers_count_if_all_their_tokens_are_the_likeliest() -> None:
    needles = plant(_encode, TEXT, 2500)
    logits = np.zeros((len(needles.tokens), 128), np.float32)
    assert needles.score(logits)["answer"] == pytest.approx(-6 * np.log(128))
    logits[np.arange(len(logits)), needles.tokens] = 50
    assert needles.score(logits) == {"needles": 16, "found": 1.0, "answer": pytest.approx(0, abs=1e-6)}
    logits[0, 1] = 60
    assert needles.score(logits)["found"] == 15 / 16
