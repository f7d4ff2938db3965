"""Reads JSON from untrusted sources."""

from __future__ import annotations

import json
import re
from typing import Any

JSON_WHITESPACE = r" |\r?\n[ \t]{0,60}"
"""The whitespace between the parts of JSON that a model writes: a space, or a line's end with an indentation. Small
models write whitespace without end where any is allowed."""
JSON_GUIDANCE = {"whitespace_pattern": JSON_WHITESPACE, "lenient": False, "coerce_one_of": False}
"""The options of llguidance ("x-guidance") for a schema within a grammar. They replace the schema's own."""
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters that change what a terminal shows, without the line feed and the tab.

The last ranges reverse the direction of text.
"""
_MAY_HAVE_CONTROLS = re.compile(rb"\\[bfru]|\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xaa-\xae]|\xe2\x81[\xa6-\xa9]")


def printable(text: str) -> str:
    r"""Returns ``text`` with control characters of terminals escaped, as in "\x1b"."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def parse_shown(text: str | bytes) -> Any:
    """Parses a document like ``parse_json``, and makes its strings ``printable``, because users will see them."""
    value = parse_json(text)
    data = text.encode(errors="replace") if isinstance(text, str) else text
    return _printable(value) if _MAY_HAVE_CONTROLS.search(data) else value


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): _printable(item) for key, item in value.items()}
    return value


def parse_json(text: str | bytes, *, repeats: bool = True) -> Any:
    r"""Parses a JSON document.

    Raises ValueError for an invalid document, for arrays nested too deep, and for escapes such as "\ud800", which only
    Python accepts. If not ``repeats``, it raises ValueError also for an object with a repeated key.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()
        value = json.loads(text, object_pairs_hook=None if repeats else _without_repeats)
    except RecursionError as e:
        raise ValueError("it is nested too deep") from e
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError, a ValueError, names the character
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"the key {key!r:.80} is there twice")
        value[key] = item
    return value
