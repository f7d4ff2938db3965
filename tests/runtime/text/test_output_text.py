"""Text is cut before the first stop string, and no part of one ever gets out."""

from __future__ import annotations

import random

import pytest

from enginewright.runtime.text.output_text import OutputText
from enginewright.runtime.text.tokenizer import Tokenizer


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
        # The text is cut before the stop string that begins first, wherever it is complete.
        begins = [text.find(s) for s in stop if s in text]
        assert "".join(pieces) == text[: min(begins, default=len(text))]
        assert stopped == bool(begins)


@pytest.mark.parametrize(
    ("text", "stop", "expected", "by"),
    [
        ("xabcd", ("bc", "abcd"), "x", "abcd"),  # "bc" is complete first, "abcd" begins first
        ("xabce", ("bc", "abcd"), "xa", "bc"),  # and where "abcd" doesn't come, it is "bc"
        ("xabc", ("bc", "abcd"), "xa", "bc"),  # nor at the end
        ("xabcabcd", ("bcab", "abcd"), "xa", "bcab"),
        ("aabbb", ("b", "abbb"), "a", "abbb"),
        ("aabbc", ("b", "abbb"), "aa", "b"),
        ("abcdef", ("abc", "abcdef"), "", "abc"),  # of those that begin there, the shortest: nobody waits for more
        ("xyzw", ("yzw", "z", "xyzv"), "x", "yzw"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_stop_strings_that_overlap(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...], expected: str, by: str, size: int
) -> None:
    """However the text comes in pieces, and whatever the order of the stop strings."""
    for stops in (stop, stop[::-1]):
        output = OutputText(tokenizer.detokenizer(), stops)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        streamed = ""
        for piece in pieces:
            stopped = output._add(piece)
            streamed += output.take()
            assert expected.startswith(streamed)
            if stopped:
                break
        else:
            assert output.finish()
            streamed += output.take()
        assert (streamed, output.stopped_by) == (expected, by)


def test_a_stop_string_may_be_complete_only_at_the_end(tokenizer: Tokenizer) -> None:
    """The model's last token is the first byte of a character: it comes out as U+FFFD, which is a stop string here."""
    output = OutputText(tokenizer.detokenizer(), ("a\ufffd",))
    for byte in b"xa\xc3":
        assert not output.push(byte)
    assert output.finish()
    assert output.take() == "x"
