"""Prints answers as they are generated, their speed, and rows of JSON."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .terminal import Wrapped, shown, terminal_width

if TYPE_CHECKING:
    from enginewright.runtime.requests.outputs import RequestOutput, StreamPiece
    from enginewright.runtime.text.chat_format import ChatParser, Delta


def result_row(result: RequestOutput) -> dict[str, Any]:
    """Returns a finished request's row for ``--json``."""
    row = {key: getattr(result, key) for key in ("text", "token_ids", "prompt_token_ids", "finish_reason")}
    if result.score is not None:
        row["score"] = result.score
    for key in ("logprobs", "prompt_logprobs"):
        if (entries := getattr(result, key)) is not None:
            row[key] = [None if entry is None else asdict(entry) for entry in entries]
    message = result.message
    if message is not None and (message.reasoning or message.calls):
        row["message"] = asdict(message)
    if result.others:
        row["others"] = [result_row(other) for other in result.others]
    return row if result.error is None else row | {"error": result.error.message}


def conversation(prompt: str, system: str | None) -> list[dict[str, Any]]:
    """Returns the messages of a conversation that begins with a prompt."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


class StreamPrinter:
    """Writes one answer to stdout while it is generated.

    Reasoning isn't part of the answer: it is dim on a terminal, and omitted elsewhere. Each call is on a line of its
    own.

    Args:
        wrap: True breaks lines between words at the terminal's edge.
        parser: separates reasoning and calls from the text; None if answers are only text.

    Attributes:
        text: the answer's text so far; it stays if the stream is interrupted.
        tokens: number of tokens so far.
    """

    def __init__(self, *, wrap: bool = False, parser: ChatParser | None = None) -> None:
        self._parser = parser
        self._dim = False
        self._calls = 0
        self._wrapped = Wrapped(sys.stdout.write, lambda: terminal_width(sys.stdout)) if wrap else None
        self.text = ""
        self.tokens = 0
        self._first = 0.0  # seconds to the first token: mostly the prompt's prefill
        self._last = 0.0
        self._cut = False

    def print(self, pieces: Iterable[StreamPiece]) -> None:
        """Writes all pieces, and a new line after them."""
        start = time.perf_counter()
        write: Callable[[str], object] = sys.stdout.write if self._wrapped is None else self._wrapped.write
        try:
            for piece in pieces:
                self._last = time.perf_counter() - start
                self._first = self._first or self._last
                self.tokens += len(piece.token_ids)
                self._cut = piece.finish_reason == "length"
                if self._parser is None:
                    self.text += piece.text
                    write(shown(piece.text, sys.stdout))
                else:
                    self._write_deltas(self._parser.push(piece.token_ids), write)
                sys.stdout.flush()
            if self._parser is not None:
                self._write_deltas(self._parser.finish(), write)
        finally:
            self._style(dim=False)
            if self._wrapped is not None:
                self._wrapped.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _write_deltas(self, deltas: Sequence[Delta], write: Callable[[str], object]) -> None:
        """Writes pieces of reasoning, answer and calls."""
        for delta in deltas:
            if delta.reasoning:
                if sys.stdout.isatty():
                    self._style(dim=True)
                    write(shown(delta.reasoning, sys.stdout))
                continue
            if self._dim:
                self._style(dim=False)
                write("\n\n")
            if delta.name is not None:
                write(("\n" if self.text or self._calls else "") + f"{shown(delta.name, sys.stdout)} ")
                self._calls += 1
            self.text += delta.content
            write(shown(delta.content or delta.arguments, sys.stdout))

    def _style(self, *, dim: bool) -> None:
        if dim == self._dim:
            return
        if self._wrapped is not None:
            self._wrapped.flush()
        self._dim = dim
        if not os.environ.get("NO_COLOR"):
            sys.stdout.write("\x1b[2m" if dim else "\x1b[22m")

    def speed(self) -> str:
        """Returns a line such as "12 tokens in 0.31 s; the first after 0.05 s, then 42.3 tokens/s"."""
        text = f"{self.tokens} tokens in {self._last:.2f} s; the first after {self._first:.2f} s"
        if self.tokens > 1 and self._last > self._first:
            text += f", then {(self.tokens - 1) / (self._last - self._first):.1f} tokens/s"
        return text + ("; cut off there (--max-tokens)" if self._cut else "")
