"""The text of a request as it grows, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Detokenizing(Protocol):
    """The methods of a ``Detokenizer``, which converts tokens to text."""

    def push(self, token: Any) -> str:
        """Returns the text that ``token`` completes; may be empty."""
        ...

    def flush(self) -> str:
        """Returns the text that was held back, after the last token."""
        ...


class OutputText:
    """The text of one request's new tokens.

    The text ends before the stop string that begins first in it, however the text is divided into tokens. Text that may
    be the beginning of a stop string is held back until more tokens decide.

    Args:
        keep_stop: True keeps the stop string at the end of the text.

    Attributes:
        stopped_by: the stop string that ended the text; if several begin there, the shortest.
    """

    def __init__(self, detokenizer: Detokenizing, stop: Sequence[str], *, keep_stop: bool = False) -> None:
        self._detokenizer = detokenizer
        self._keep_stop = keep_stop
        self._stop = tuple(stop)
        self._held = ""
        self._ready: list[str] = []
        self.stopped_by: str | None = None

    def push(self, token: Any) -> bool:
        """Appends a new token. Returns True if a stop string has ended the text."""
        return self._add(self._detokenizer.push(token))

    def finish(self) -> bool:
        """Releases the text that was held back, after the last token. Returns True if a stop string ended the text."""
        if self._add(self._detokenizer.flush()):
            return True
        if self._cut_at(_first_of(self._stop, self._held), self._held):
            return True
        self._ready.append(self._held)
        self._held = ""
        return False

    def take(self) -> str:
        """Returns the text that became certain since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _add(self, piece: str) -> bool:
        if self.stopped_by is not None or not piece:
            return False
        if not self._stop:
            self._ready.append(piece)
            return False
        text = self._held + piece
        pending = len(text) - max(_overlap(text, s) for s in self._stop)  # where a stop string may have begun
        first_stop = _first_of(self._stop, text)
        if first_stop is not None and first_stop[0] <= pending:
            return self._cut_at(first_stop, text)
        self._ready.append(text[:pending])
        self._held = text[pending:]
        return False

    def _cut_at(self, found: tuple[int, str] | None, text: str) -> bool:
        if found is None or self.stopped_by is not None:
            return False
        self._ready.append(text[: found[0] + (len(found[1]) if self._keep_stop else 0)])
        self._held = ""
        self.stopped_by = found[1]
        return True


def _first_of(stop: Sequence[str], text: str) -> tuple[int, str] | None:
    """Returns the position of the stop string that begins first, and the string; None if there is none."""
    stops = [(at, len(s), s) for s in stop if (at := text.find(s)) >= 0]
    return (min(stops)[0], min(stops)[2]) if stops else None


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of ``text`` that is a proper beginning of ``stop``; 0 if there is none."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-n:]):
            return n
    return 0
