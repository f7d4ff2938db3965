"""The texts of a file: its lines, or a field of its lines of JSON."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from enginewright.runtime.bundle.regular_file import open_regular
from enginewright.runtime.shared.errors import RequestError, shown

JSON_SUFFIXES = (".jsonl", ".ndjson")
_MOST_LINE = 64 << 20
"""The most bytes of a line."""
_HINT = "Each line is a text; with --field, or in a .jsonl file, a JSON object with a text."


class TextFile:
    """A file of texts. It is read again for each use, so that it needn't fit into memory.

    Args:
        path: the file.
        field: the field with the text of each line, a JSON object; None: "text" of a .jsonl file, and otherwise each
            line is a text.

    Attributes:
        count: the number of texts.
        digest: SHA-256 of the file, in hexadecimal.

    Raises RequestError naming the file, and the line that is empty or has no text.
    """

    def __init__(self, path: Path, field: str | None = None) -> None:
        self.path = path
        self.field = "text" if field is None and path.suffix.lower() in JSON_SUFFIXES else field
        digest, self.count = hashlib.sha256(), 0
        for line in self._lines():
            digest.update(line)
            self.count += 1
        self.digest = digest.hexdigest()
        if not self.count:
            raise RequestError(f"{path}: it is empty", hint=_HINT)

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self._lines(), 1):
            text = self._text(line, f"{self.path}:{number}")
            if not text.strip():
                raise RequestError(f"{self.path}:{number}: it is empty", hint="Each line gets a vector: remove it.")
            yield text

    def _lines(self) -> Iterator[bytes]:
        try:
            with open_regular(self.path) as file:
                number = 0
                while line := file.readline(_MOST_LINE + 1):
                    number += 1
                    if len(line) > _MOST_LINE:
                        raise RequestError(f"{self.path}:{number}: it has more than {_MOST_LINE:,} bytes", hint=_HINT)
                    yield line
        except OSError as e:
            raise RequestError(f"{os.fspath(self.path)!r} can't be read: {e.strerror}", hint=_HINT) from e

    def _text(self, line: bytes, place: str) -> str:
        """Returns the text of a line; ``place`` is its name in errors."""
        if self.field is None:
            try:
                return line.decode().rstrip("\r\n")
            except UnicodeDecodeError as e:
                raise RequestError(f"{place}: it isn't in UTF-8", hint="Convert the file.") from e
        try:
            row: Any = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise RequestError(f"{place}: it isn't JSON: {e}", hint=_HINT) from e
        text = row.get(self.field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            what = f"its field {self.field!r} is {shown(text)}" if isinstance(row, dict) else "it isn't an object"
            raise RequestError(f"{place}: {what}", hint="Name the field with a text by --field.")
        return text
