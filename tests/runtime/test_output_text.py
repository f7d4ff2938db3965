"""Text is cut before the first stop string, and no part of one ever gets out."""

from __future__ import annotations

import random

import pytest

from enginewright.runtime.output_text import OutputText
from enginewright.runtime.tokenizer import Tokenizer


def run(tokenizer: Tokenizer, text: str, stop: tuple[str, ...]) -> tuple[list[str], bool]:
    """The pieces as the bytes of ``text`` come one by one, and whether a stop string ended it."""
    output = OutputText(tokenizer.detokenizer(), stop)
    pieces = []
    for byte in text.encode():
        stopped = output.push(byte)
        pieces.append(output.take())
        if stopped:
            return pieces, True
    stopped = output.finish()
    return [*pieces, output.take()], stopped


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ("END",), "one "),
        ("one EN two", ("END",), "one EN two"),
        ("ends in EN", ("END",), "ends in EN"),
        ("aaab", ("aab",), "a"),
        ("xx\n\nyy", ("\n\n",), "xx"),
        ("abcd", ("cd", "bcd", "zz"), "a"),
        ("néé!", ("éé",), "n"),
        ("END", ("END",), ""),
        ("no stop", (), "no stop"),
    ],
)
def test_stop_strings_across_tokens(tokenizer: Tokenizer, text: str, stop: tuple[str, ...], expected: str) -> None:
    pieces, stopped = run(tokenizer, text, stop)
    assert "".join(pieces) == expected
    assert stopped == any(s in text for s in stop)


def test_what_cannot_be_a_stop_string_comes_at_once(tokenizer: Tokenizer) -> None:
    pieces, _ = run(tokenizer, "abENcd", ("END",))
    assert pieces == ["a", "b", "", "", "ENc", "d", ""]


@pytest.mark.parametrize("seed", range(3))
def test_any_text(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        text = "".join(rng.choice("abé") for _ in range(rng.randint(0, 12)))
        stop = tuple("".join(rng.choice("abé") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(0, 3)))
        pieces, stopped = run(tokenizer, text, stop)
        # The text ends with the first character that completes a stop string, and is cut before the earliest of them.
        ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stop)]
        seen = text[: ends[0]] if ends else text
        assert "".join(pieces) == (seen[: min(seen.find(s) for s in stop if s in seen)] if ends else text)
        assert stopped == bool(ends)


def test_a_stop_string_may_be_complete_only_at_the_end(tokenizer: Tokenizer) -> None:
    """The model's last token is the first byte of a character: it comes out as U+FFFD, which is a stop string here."""
    output = OutputText(tokenizer.detokenizer(), ("a\ufffd",))
    for byte in b"xa\xc3":
        assert not output.push(byte)
    assert output.finish()
    assert output.take() == "x"
