from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from enginewright.optimizer.evaluate.choices import read_questions
from enginewright.optimizer.measure.texts import BUILT_IN, read_prompts, read_text
from enginewright.runtime.shared.errors import RequestError


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffStraße\r\n naïve \n".encode())
    assert read_text(file, "text", "evaluation_text.txt") == "Straße\r\n naïve \n"


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"ab\0c", "binary: byte 2"),
        (b"ab\xffc", "not UTF-8 at byte 2"),
        ("é".encode("latin-1"), "not UTF-8 at byte 0"),
    ],
)
def test_what_is_no_text_is_named(data: bytes, named: str, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(data)
    with pytest.raises(RequestError, match=named) as caught:
        read_text(file, "text", "evaluation_text.txt")
    assert str(file) in caught.value.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RequestError, match=r"text: .* can't be read"):
            read_text(place, "text", "evaluation_text.txt")


def test_the_built_in_text_is_long_and_varied() -> None:
    text = read_text(BUILT_IN, "text", "evaluation_text.txt")
    assert 4500 <= len(text.split()) <= 6000
    for mark in ("def merge_sorted(", "template <typename", "| Firm ", "« Vous", "»Und dann?«", "SELECT", '"port"'):
        assert mark in text
    paragraphs = [p for p in re.split(r"\n\n+", text) if len(p) > 60]
    assert len(paragraphs) == len(set(paragraphs)) > 100


def test_the_built_in_questions_are_forty_and_fair() -> None:
    questions = read_questions(BUILT_IN)
    assert len(questions) == len({q.prompt for q in questions}) == 40
    assert all(len(q.choices) == 4 for q in questions)
    for place in range(4):  # always taking the same place gets a quarter
        assert sum(q.answer == place for q in questions) == 10


def test_a_pipe_or_a_device_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path / "pipe", "it is a pipe"), (Path("/dev/zero"), "it is a device")):
        with pytest.raises(RequestError, match=f"text: {path} can't be read: {what}"):
            read_text(path, "text", "evaluation_text.txt")


def test_the_built_in_prompts_are_texts_and_conversations() -> None:
    prompts = read_prompts(BUILT_IN)
    assert len(prompts) == 12 and len({(p.text, str(p.messages)) for p in prompts}) == 12
    assert sum(p.text is None for p in prompts) == 4 and all((p.text is None) != (not p.messages) for p in prompts)
    assert all(m["role"] in ("user", "assistant") and m["content"] for p in prompts for m in p.messages)
    assert prompts[0].where == "built-in:1"


def test_prompts_of_a_file_are_lines_or_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("One, two\n\n  three {\n")
    assert [(p.where, p.text) for p in read_prompts(file)] == [(f"{file}:1", "One, two"), (f"{file}:3", "  three {")]
    file.write_text('{"prompt": "a\\nb"}\n{"messages": [{"role": "user", "content": "c"}]}\n')
    first, second = read_prompts(file)
    assert first.text == "a\nb" and second.messages == ({"role": "user", "content": "c"},)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("plain", "not JSON"),
        ("[1]", "one of prompt and messages"),
        ("{}", "one of prompt and messages"),
        ('{"prompt": "a", "messages": []}', "one of prompt and messages"),
        ('{"prompt": ""}', "prompt must be a text"),
        ('{"prompt": 1}', "prompt must be a text"),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": ["a"]}', "messages must be a list"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(RequestError, match=f"prompts: .*jsonl:2: .*{named}"):
        read_prompts(file)
