"""The shapes that ``make lint`` refuses: each rule finds its own, plain English passes, and the list only shrinks."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import plain_words

PLACES = (
    '"""{}"""',
    'X = 1\n"""{}"""',
    'class A:\n    """{}"""',
    'class A:\n    x: int\n    """{}"""',
    'def f():\n    """{}"""',
)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("first", plain_words.FIRST_WORDS)
def test_a_docstring_with_a_forbidden_first_word_is_found(first: str, place: str) -> None:
    source = ast.parse(place.format(f"{first} the model needs."))
    [(line, message)] = plain_words.first_words(source)
    assert line == place.count("\n") + 1 and f'begins with "{first}"' in message


@pytest.mark.parametrize(
    "docstring",
    [
        "Sums the costs of all steps, as what they take.",
        "The bytes of all blocks.",
        "Returns True if a file is there.",
        "Seeds of the sampler.",
        "Asks the engine.",
        "Theses of a paper.",
        "",
    ],
)
def test_a_docstring_that_begins_with_a_verb_or_a_noun_passes(docstring: str) -> None:
    for place in PLACES:
        assert list(plain_words.first_words(ast.parse(place.format(docstring)))) == []
    assert list(plain_words.first_words(ast.parse('x = f("""What a text says.""")'))) == []


@pytest.mark.parametrize("name", plain_words.LOCALS)
@pytest.mark.parametrize(
    "statement",
    ["{} = 1", "{}: int = 1", "a, {} = 1, 2", "for {} in x: pass", "x = [{0} for {0} in y]", "f({} := 1)"],
)
def test_a_local_named_for_its_origin_is_found(name: str, statement: str) -> None:
    source = "def f(x, y):\n    " + statement.format(name)
    assert [line for line, _ in plain_words.locals_by_origin(ast.parse(source))] == [2]


@pytest.mark.parametrize(
    "source",
    [
        "class Record:\n    found: int = 0\n    given = 1",  # fields have names of their own
        "def f(own, *, kept=1):\n    return own + kept",  # so have parameters
        "blocks = f(found=1)\nself.taken = blocks",
        "founds = 1",
    ],
)
def test_fields_parameters_and_other_names_pass(source: str) -> None:
    assert list(plain_words.locals_by_origin(ast.parse(source))) == []


@pytest.mark.parametrize("first", plain_words.STARTS)
@pytest.mark.parametrize(
    "page", ["{} it needs is here.", "Short. **{} it needs** is here.", "- {} it needs\n", "a\n| b | {} c |"]
)
def test_a_sentence_with_a_forbidden_start_is_found(first: str, page: str) -> None:
    [(_, message)] = plain_words.sentence_starts(page.format(first))
    assert f'begins with "{first}"' in message


@pytest.mark.parametrize(
    "page",
    [
        "The engine says what it needs. Whatever comes, it waits.",
        "What does it need? A folder.",
        "# What it needs\n\nA folder of\nWhat it holds.",
        "```\nWhat a program prints.\n```",
    ],
)
def test_other_sentences_questions_headings_and_code_pass(page: str) -> None:
    assert list(plain_words.sentence_starts(page)) == []


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
    assert [line for line, _ in plain_words.long_sentences(page)] == lines


def command(*names: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, plain_words.__file__, *map(str, names)], capture_output=True, text=True)
    return done.returncode, done.stdout


def test_the_command_names_file_and_line(tmp_path: Path) -> None:
    page, source = tmp_path / "page.md", tmp_path / "source.py"
    page.write_text(f"one\n\nThat is it.\n\n{LONG}.\n", encoding="utf-8")
    source.write_text('"""How it works."""\nfound = 1\n', encoding="utf-8")
    status, printed = command(page, source)
    assert status == 1
    assert f'{page}:3: a sentence begins with "That"' in printed and f"{page}:5: 31 words, at most 30" in printed
    assert (
        f'{source}:1: a docstring begins with "How"' in printed and f'{source}:2: a local is named "found"' in printed
    )
    page.write_text("It works.\n", encoding="utf-8")
    source.write_text('"""Works."""\nblocks = 1\n', encoding="utf-8")
    assert command(page, source) == (0, "")


def test_a_folder_that_has_become_clean_must_leave_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"a/old/x.py": "found = 1", "a/new/x.py": "blocks = 1", "a/x.py": "blocks = 1"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
    monkeypatch.setattr(plain_words, "REPOSITORY", tmp_path)
    monkeypatch.setattr(plain_words, "NOT_CLEAN", ("a/old", "a/new"))
    assert plain_words.main([]) == 1
    assert capsys.readouterr().out == "a/new is clean: take it out of NOT_CLEAN in tests/plain_words.py\n"
    monkeypatch.setattr(plain_words, "NOT_CLEAN", ("a/old",))
    assert plain_words.main([]) == 0
    monkeypatch.setattr(plain_words, "NOT_CLEAN", ("a",))  # its own files alone
    assert plain_words.main([]) == 1
    assert 'a/old/x.py:1: a local is named "found"' in capsys.readouterr().out


def test_no_page_is_allowed_more_than_it_has() -> None:
    for name, allowed in plain_words.STILL_LONG.items():
        text = (plain_words.REPOSITORY / name).read_text(encoding="utf-8")
        assert len(list(plain_words.long_sentences(text))) <= allowed
