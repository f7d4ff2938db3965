"""The text of a request as it grows, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import Detokenizer


class OutputText:
    """Text of the new tokens of one request.

    What may be the beginning of a stop string is held back until it is clear that it is none.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._held = ""
        self._ready: list[str] = []
        self.stopped = False

    def push(self, token: int) -> bool:
        """Takes a new token; True if its text completes a stop string."""
        return self._add(self._detokenizer.push(token))

    def finish(self) -> bool:
        """Gives out all that was held back; True if that completes a stop string."""
        stopped = self._add(self._detokenizer.flush())
        self._ready.append(self._held)
        self._held = ""
        return stopped

    def take(self) -> str:
        """The text that became certain since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _add(self, piece: str) -> bool:
        if self.stopped or not piece:
            return False
        if not self._stop:
            self._ready.append(piece)
            return False
        text = self._held + piece
        found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if found:
            self._ready.append(text[: min(found)])
            self._held = ""
            self.stopped = True
            return True
        certain = len(text) - max((_overlap(text, s) for s in self._stop), default=0)
        self._ready.append(text[:certain])
        self._held = text[certain:]
        return False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins, but is not all of, ``stop``."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-n:]):
            return n
    return 0
