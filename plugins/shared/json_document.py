"""Reads JSON that may be damaged."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON document.

    Raises ValueError for all that is wrong with it: also for arrays nested too deep, and for escapes such as
    "\\ud800", which Python takes and no other reader or file does.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()
        value = json.loads(text)
    except RecursionError as e:
        raise ValueError("it is nested too deep") from e
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError, a ValueError, names the character
    return value
