"""Whatever is wrong with a document is a ValueError."""

from __future__ import annotations

import json

import pytest

from enginewright.runtime.shared.json_document import parse_json, parse_shown


def test_documents() -> None:
    assert parse_json('{"a": [1, "é", "\\ud83d\\ude00"]}') == {"a": [1, "é", "😀"]}
    assert parse_json(b"[1, 2]") == [1, 2]
    assert parse_json('"\\\\ud800"') == "\\ud800"  # a backslash, and no escape


@pytest.mark.parametrize(
    "text", ["", "{", b"\xff", "[" * 100_000, '{"a": "\\ud800"}', '{"\\uDFFF": 1}', "9" * 5000, '\ufeff{"a": 1}']
)
def test_what_is_none(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_what_is_shown_has_no_characters_that_a_terminal_obeys() -> None:
    text = json.dumps({"name\x1b[2J": ["\x07\r\x9b1m", "\u202e", {"a": "b\n\tc é 世界 \\x1b"}]})
    assert (
        parse_shown(text)
        == parse_shown(text.encode())
        == {"name\\x1b[2J": ["\\x07\\r\\x9b1m", "\\u202e", {"a": "b\n\tc é 世界 \\x1b"}]}
    )
    raw = json.dumps({"name": "\x7f\x9b \u2066"}, ensure_ascii=False)  # which JSON may have as they are
    assert parse_shown(raw) == {"name": "\\x7f\\x9b \\u2066"}
    assert parse_json(raw) == {"name": "\x7f\x9b \u2066"}
