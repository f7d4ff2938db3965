"""Words aren't cut at a terminal's edge, however they come."""

from __future__ import annotations

import io
import random

import pytest

from enginewright.optimizer.cli.terminal import Wrapped, shown


def wrapped(text: str, width: int, pieces: int = 1, seed: int = 0) -> str:
    """The lines written when ``text`` comes in pieces of random sizes."""
    written: list[str] = []
    out = Wrapped(written.append, lambda: width)
    rng = random.Random(seed)
    cuts = sorted(rng.choices(range(len(text) + 1), k=pieces - 1))
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        out.write(text[start:end])
    out.flush()
    return "".join(written)


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("one two three", 7, "one two\nthree"),
        ("one two three", 6, "one\ntwo\nthree"),
        ("one two three", 100, "one two three"),
        ("one\ntwo three", 8, "one\ntwo\nthree"),
        ("a incomprehensible b", 6, "a incomprehensible\nb"),  # longer than a line: the terminal breaks it
        ("    indented words", 10, "    indented\nwords"),
        ("one  two ", 8, "one  two "),
        ("海洋很大", 5, "海洋\n很大"),
        ("a 海 b", 4, "a 海\nb"),
        ("e\u0301e\u0301 e\u0301", 4, "e\u0301e\u0301 e\u0301"),
        ("", 5, ""),
    ],
)
def test_lines_end_between_words(text: str, width: int, expected: str) -> None:
    assert wrapped(text, width) == expected


def test_pieces_change_nothing_and_no_word_is_lost() -> None:
    rng = random.Random(1)
    for seed in range(50):
        words = ["".join(rng.choices("abcé海", k=rng.randint(1, 9))) for _ in range(30)]
        text = "".join(word + rng.choice([" ", "  ", "\n", "\n\n"]) for word in words)
        width = rng.randint(5, 20)
        whole = wrapped(text, width)
        assert wrapped(text, width, pieces=12, seed=seed) == whole
        assert "".join(whole.split()) == "".join(text.split())
        narrow = "".join(word + " " for word in words if "海" not in word)
        assert wrapped(narrow, width).split() == narrow.split()
        for line in wrapped(narrow, width).split("\n"):  # words that are longer than a line stay as they are
            assert len(line.rstrip()) <= width or any(len(word) > width for word in line.split())


class _Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def test_generated_text_does_not_speak_to_the_terminal() -> None:
    text = "a\tb\r\nc\rd \x1b]0;title\x07 \x9b31m\x7f \u2028 \U0001f30a"
    assert shown(text, _Stream(terminal=True)) == "a\tb\nc\nd \u241b]0;title\u2407 \ufffd31m\u2421 \u2028 \U0001f30a"
    assert shown(text, _Stream(terminal=False)) == text
