"""Whatever is wrong with a document is a ValueError."""

from __future__ import annotations

import pytest

from enginewright.plugins.shared.json_document import parse_json


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
