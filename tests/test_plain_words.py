"""Phrases that ``make lint`` refuses: each pattern finds its own, over a line's end too, and plain English passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import plain_words

PLANTED = {
    "a folder is no bundle": "is no b",
    "these are no integers": "are no i",
    "it was turned down": "turned down",
    "turned something down": "turned something down",
    "weights are turned round": "turned round",
    "where nobody says": "nobody says",
    "timed by turns": "by turns",
    "calls take turns": "take turns",
    "a stage that tells of nothing": "tells of",
    "views are not told apart": "told apart",
    "threads and company change no bit": "company change",
    "the same in any company": "any company",
    "a KL of 0.1 in the mean": "in the mean",
    "what makes up for it": "makes up for",
    "what lies behind it": "lies behind it",
    "who is told the stage": "told the stage",
    "however it is come by": "come by",
    "gone over in pieces": "gone over in",
    "a sum rests in memory": "rests in memory",
    "scaled by nobody knows what": "nobody knows what",
    "the run goes on with it": "goes on with",
    "by no doing of ours": "no doing of",
    "soon enough for all": "soon enough for",
    "Wanda is what is taken": "is what is taken",
    "so as when they spin": "so as when",
    "a row is not so any more": "not so any more",
    "the file is no good": "is no good",
}


@pytest.mark.parametrize("text", PLANTED)
def test_a_planted_phrase_is_found(text: str) -> None:
    assert PLANTED[text] in {said for _, said, _ in plain_words.findings(f"first line\n{text}\n")}
    for mark in ("", "# ", "// "):
        broken = text.replace(" ", f"\n    {mark}")
        assert {line for line, _, _ in plain_words.findings(broken)}, broken


def test_every_pattern_is_planted() -> None:
    said = {instead for text in PLANTED for _, _, instead in plain_words.findings(text)}
    assert said == {instead for _, instead in plain_words.PHRASES}


@pytest.mark.parametrize(
    "text", ["There is no tokenizer.", "It is no longer there.", "no worse", "the company's name", "is no larger than"]
)
def test_plain_english_passes(text: str) -> None:
    assert list(plain_words.findings(text)) == []


def test_the_command_names_file_and_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("one\ntwo\nthis is no bundle\n", encoding="utf-8")
    command = [sys.executable, plain_words.__file__]
    done = subprocess.run([*command, str(page)], capture_output=True, text=True)
    assert done.returncode == 1 and f'{page}:3: "is no b": write isn\'t a' in done.stdout
    page.write_text("plain\n", encoding="utf-8")
    assert subprocess.run([*command, str(page)]).returncode == 0


LONG = " ".join(["word"] * 31)


@pytest.mark.parametrize(
    ("page", "lines"),
    [
        (f"Short. {LONG}.\n", [1]),
        (f"one\ntwo\n\n- an item. {LONG}\n", [4]),
        (f"| a | {LONG} |\n| b | short |\n", [1]),
        (f"first line\n{LONG}\n", [1]),  # the sentence begins there
        (f"{LONG[:69]}. {LONG[70:].capitalize()}\n", []),
        (f"```\n{LONG}\n```\n# {LONG}\n", []),
        (f"- {LONG[:70]}\n- {LONG[70:]}\n", []),
        (" ".join(["[word](a b c d)"] * 30) + "\n", []),
    ],
)
def test_a_long_sentence_is_found_and_short_ones_are_not(page: str, lines: list[int]) -> None:
    assert [line for line, _, _ in plain_words.long_sentences(page)] == lines


def test_a_page_with_more_long_sentences_than_it_had_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{LONG}.\n", encoding="utf-8")
    command = [sys.executable, plain_words.__file__, str(page)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and f"{page}:1: 31 words, at most 30" in done.stdout


@pytest.mark.parametrize(
    "docstring",
    [
        "Of all steps together.",
        "Of a kernel: an address, which is 64 bits.",
        "As plain values.",
        "For people: 1.2 GiB. It is short.",
        "Along a new\n    last dimension only.",
        "In degrees, as a picture turns.\n\n    It is rounded.",
    ],
)
@pytest.mark.parametrize("place", ['"""{}"""', 'X = 1\n"""{}"""', 'class A:\n    """{}"""', 'def f():\n    """{}"""'])
def test_a_docstring_without_a_verb_is_found(docstring: str, place: str) -> None:
    assert len(list(plain_words.verbless_docstrings(place.format(docstring)))) == 1


@pytest.mark.parametrize(
    "docstring",
    [
        "Sums the costs of all steps.",
        "The bytes of all blocks.",
        "Where a file lies.",
        "In 32-bit floats K is a power of two.",
        "Without a recipe the result isn't rounded.",
        "As many tokens as there are, [T]: in a step they follow each other.",
        "",
    ],
)
def test_a_docstring_with_a_verb_or_a_noun_passes(docstring: str) -> None:
    assert list(plain_words.verbless_docstrings(f'def f():\n    """{docstring}"""\n')) == []
    assert list(plain_words.verbless_docstrings(f'x = f("""{docstring}""")\n')) == []


def test_no_page_is_allowed_more_than_it_has() -> None:
    for name, allowed in plain_words.STILL_LONG.items():
        text = (plain_words.REPOSITORY / name).read_text(encoding="utf-8")
        assert len(list(plain_words.long_sentences(text))) <= allowed
