"""Reads an answer's text piece by piece and collects its parts: the base of the parser and the notations of calls.

A parser's functions are generators: each yields when it needs more text, and returns its result. Text that was read is
dropped unless ``hold`` was called.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from .answers import Delta, Message, ToolCall
from .json_types import json_value, tool_schemas
from .markers import FIRST_MARKER, MARKERS, OTHERS, CodedFormat

Steps = Generator[None, None, Any]
"""A part of a parser: it yields when it needs more text."""

LONGEST_NAME = 256
_SPACE = " \n\r\t"
_OUTSIDE_STRING = re.compile('["{}\\[\\]\udc00-\udfff]')
_IN_STRING = re.compile('["\\\\\x00-\x1f\ud800-\udfff]')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_BETWEEN = re.compile("(?<=[>\udc00-\udfff])(?=[<\udc00-\udfff])")


class Stops:
    """Texts that end another text. Finds the first of them, or the beginning of one at the end of a text."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(dict.fromkeys(text for text in texts if text))
        self.pattern = re.compile("|".join(map(re.escape, sorted(self.texts, key=len, reverse=True))) or "(?!)")
        self.longest = max(map(len, self.texts), default=1) - 1
        self.begins = frozenset(text[:n] for text in self.texts for n in range(1, len(text)))
        self._first = {text[0] for text in self.texts if len(text) > 1}

    def held(self, text: str, at: int) -> int:
        """Returns the first position, from ``at`` on, such that the text from there is the beginning of a stop.

        Returns the length of the text if there is no such position.
        """
        for start in range(max(at, len(text) - self.longest), len(text)):
            if text[start] in self._first and text[start:] in self.begins:
                return start
        return len(text)


class AnswerReader:
    """The unread text of one answer, and the parts read so far.

    Attributes:
        text, at: the unread text begins at ``text[at]``.
        ended: True if no token follows.
        cut: True if the answer was cut off within a call.
        schemas: the schema of each tool's arguments by name; None if the offered tools are unknown.
        in_reasoning: True within the reasoning.
        held_space: space that becomes content only if text follows.
        trim: True if space before the next text isn't part of it.
        content, reasoning: the pieces of each.
        names: names of the tools called so far.
    """

    def __init__(
        self, coded: CodedFormat[Any], tools: Sequence[Mapping[str, Any]] | None = None, reasoning_open: bool = False
    ) -> None:
        self._coded = coded
        self._pieces = coded.pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._undecoded = False
        self._kept: int | None = None
        self.text = ""
        self.at = 0
        self.ended = False
        self.cut = False
        self.schemas = tool_schemas(tools)
        self.in_reasoning = reasoning_open
        self.held_space = ""
        self.trim = False
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.names: list[str] = []
        self._ids: list[str | None] = []
        self._arguments: list[list[str]] = []
        self._complete: list[bool] = []
        self._deltas: list[Delta] = []

    # ---- tokens

    def push(self, token_ids: Sequence[int]) -> None:
        """Appends the text of these tokens to the unread text."""
        pieces = self._pieces
        for token in token_ids:
            piece = pieces.get(token)
            if piece is None:
                piece = self._coded.piece(token)
            if not self._undecoded and type(piece) is str:
                self.text += piece
            elif type(piece) is str and piece and token in self._coded.surrogates:
                self.text += self._decoder.decode(b"", True) + piece
                self._decoder.reset()
                self._undecoded = False
            else:
                self.text += self._decoder.decode(piece.encode() if type(piece) is str else piece)  # type: ignore[arg-type]
                self._undecoded = bool(self._decoder.getstate()[0])

    def end(self) -> None:
        """Notes that no token follows."""
        self.text += self._decoder.decode(b"", True)
        self.ended = True

    def drop_read(self) -> None:
        """Drops the text that was read, unless a part of the parser may return to it."""
        if self._kept is None and self.at:
            self.text = self.text[self.at :]
            self.at = 0

    def hold(self) -> int | None:
        """Keeps the text from here on, so that a parser may return to it. Returns the argument of ``release``."""
        before = self._kept
        if before is None:
            self._kept = self.at
        return before

    def release(self, before: int | None) -> None:
        """Ends a ``hold``: text that was read may be dropped again, unless an outer ``hold`` is active.

        Args:
            before: the result of that ``hold``.
        """
        self._kept = before

    def holds_from(self, position: int) -> bool:
        """Returns True if the text from a position on can't have been dropped."""
        return self._kept is None or self._kept <= position

    # ---- results

    def take_deltas(self) -> list[Delta]:
        """Returns the pieces that were added since the last call of this method."""
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def message(self) -> Message:
        """The answer so far, in its parts."""
        calls = tuple(
            ToolCall(name, "".join(arguments), key, complete)
            for name, key, arguments, complete in zip(
                self.names, self._ids, self._arguments, self._complete, strict=True
            )
        )
        return Message(
            "".join(self.content) or None,
            "".join(self.reasoning) or None,
            calls,
            complete=not self.cut and not self.in_reasoning and all(self._complete),
        )

    def add_content(self, text: str) -> None:
        """Adds a piece of content to the answer's message and deltas."""
        if MARKERS.search(text):
            text = MARKERS.sub(lambda match: self._coded.shown[match[0]], text)
        self._add(text, self.content, "content")

    def add_reasoning(self, text: str) -> None:
        """Adds a piece of reasoning to the answer's message and deltas."""
        if MARKERS.search(text):
            text = self.spell(text)
        self._add(text, self.reasoning, "reasoning")

    def _add(self, text: str, parts: list[str], kind: str) -> None:
        if self.trim:
            text = text.lstrip()
            self.trim = not text
        body = text.rstrip()
        if not body:
            self.held_space += text
            return
        piece = self.held_space + body
        self.held_space = text[len(body) :]
        parts.append(piece)
        last = self._deltas[-1] if self._deltas else None
        if last is not None and getattr(last, kind):
            self._deltas[-1] = Delta(**{kind: getattr(last, kind) + piece})
        else:
            self._deltas.append(Delta(content=piece) if kind == "content" else Delta(reasoning=piece))

    def add_last_space(self) -> None:
        """Adds the space at the end of an answer without calls to its content."""
        if self.held_space and not self.names and not self.trim and not self.in_reasoning:
            self.content.append(self.held_space)
            self._deltas.append(Delta(content=self.held_space))
        self.held_space = ""

    def begin_text(self, kind: str) -> None:
        """Begins a text of the kind "content" or "reasoning".

        A line break separates it from an earlier one of that kind.
        """
        self.held_space = ""
        self.trim = True
        parts = self.content if kind == "content" else self.reasoning
        if parts:
            parts.append("\n")
            self._deltas.append(Delta(**{kind: "\n"}))  # type: ignore[arg-type]

    def begin_call(self, name: str, key: str | None = None) -> None:
        """Begins a call of a tool; ``key`` is its id."""
        self._deltas.append(Delta(call=len(self.names), id=key, name=name))
        self.names.append(name)
        self._ids.append(key)
        self._arguments.append([])
        self._complete.append(False)

    def add_arguments(self, text: str) -> None:
        """Adds a piece of the last call's arguments, which is JSON."""
        if OTHERS.search(text):
            text = OTHERS.sub("", text)
        if not text:
            return
        index = len(self.names) - 1
        self._arguments[index].append(text)
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.call == index:
            self._deltas[-1] = replace(last, arguments=last.arguments + text)
        else:
            self._deltas.append(Delta(call=index, arguments=text))

    def add_quoted(self, text: str) -> None:
        """Adds a piece of a string value to the last call's arguments; the piece is escaped for JSON first."""
        self.add_arguments(self.quoted(text))

    def end_call(self) -> None:
        """Ends the last call: it is complete if its arguments are a JSON object."""
        self._complete[-1] = isinstance(json_value("".join(self._arguments[-1])), dict)

    def reject_call(self, opener: str, raw: str = "", expected: str = "") -> None:
        """Adds a text that looked like a call to the content. If the answer ends there, it counts as cut off instead.

        Args:
            opener, raw: the text already read.
            expected: the text that should follow. An answer that ends with a beginning of it was cut off.
        """
        if self.broke_off(expected):
            return
        if self.at_end:
            self.cut = True
        else:
            self.add_content(self.spell(opener + raw))

    def spell(self, text: str) -> str:
        """Returns a text in which markers, which are single characters here, have their spelling."""
        return MARKERS.sub(lambda match: self._coded.spelled[match[0]], text)

    def quoted(self, text: str) -> str:
        """Returns a text as it is written within a JSON string."""
        if MARKERS.search(text):
            text = self.spell(text)
        return json.dumps(text, ensure_ascii=False)[1:-1]

    # ---- reading

    @property
    def rest(self) -> str:
        """The text that isn't read yet, without tokens that have no text."""
        return OTHERS.sub("", self.text[self.at :])

    @property
    def at_end(self) -> bool:
        """True if the answer has ended, and nothing but space is left."""
        return self.ended and not self.rest.strip()

    def broke_off(self, expected: str) -> bool:
        """Returns True if the answer has ended and its unread rest is only the beginning of ``expected``, ignoring
        space.

        Then the rest is consumed, and ``cut`` is set.
        """
        if not self.ended or not "".join(expected.split()).startswith("".join(self.rest.split())):
            return False
        self.at = len(self.text)
        self.cut = True
        return True

    def need(self, n: int) -> Steps:
        """Yields until there are ``n`` unread characters. Returns False if the answer ends before, otherwise True."""
        while len(self.text) - self.at < n:
            if self.ended:
                return False
            yield
        return True

    def skip_space(self) -> Steps:
        """Skips space, and tokens without text."""
        while (yield from self.need(1)) and _is_space(self.text[self.at]):
            self.at += 1

    def hold_space(self) -> Steps:
        """Reads the space before an answer into ``held_space``."""
        while (yield from self.need(1)) and _is_space(self.text[self.at]):
            self.held_space += OTHERS.sub("", self.text[self.at])
            self.at += 1

    def peek(self, texts: Sequence[str]) -> Steps:
        """Returns the longest of these texts that follows; None if none does."""
        for text in sorted(texts, key=len, reverse=True):
            n = 1
            while n <= len(text) and (yield from self.need(n)):
                if self.text[self.at + n - 1] != text[n - 1]:
                    break
                n += 1
            if n > len(text):
                return text
        return None

    def take(self, *texts: str) -> Steps:
        """Consumes one of these texts if it follows. Returns the text, or None."""
        text = yield from self.peek(texts)
        if text is not None:
            self.at += len(text)
        return text

    def take_words(self, text: str) -> Steps:
        """Consumes ``text`` if it follows, with any space between its words.

        Returns True, or False if another text follows.
        """
        start, before = self.at, self.hold()
        for part in words(text):
            yield from self.skip_space()
            if (yield from self.take(part)) is None:
                self.at = start
                self.release(before)
                return False
        self.release(before)
        return True

    def read_until(self, stops: Stops, emit: Callable[[str], None], *, whole: bool = False) -> Steps:
        """Emits the text before the first stop, and consumes and returns the stop; None if the answer ends first.

        At the answer's end, the beginning of a stop is emitted as text, unless it contains a marker or ``whole`` is
        True.

        Args:
            stops: the texts to stop at.
            emit: called with each piece of text.
            whole: True if an incomplete stop at the answer's end is dropped.
        """
        while True:
            text = self.text
            match = stops.pattern.search(text, self.at)
            if match is not None:
                emit(text[self.at : match.start()])
                self.at = match.end()
                return match[0]
            sure = stops.held(text, self.at)
            if self.ended and not (whole or MARKERS.search(text, sure)):
                sure = len(text)
            if sure > self.at:
                emit(text[self.at : sure])
                self.at = sure
            if self.ended:
                self.cut = self.cut or sure < len(text)
                self.at = len(text)
                return None
            yield
            self.drop_read()

    def read_word(self, stops: Stops) -> Steps:
        """Returns a short text up to a stop, and the stop; None if none follows within 256 characters."""
        before = self.hold()
        try:
            while True:
                match = stops.pattern.search(self.text, self.at)
                if match is not None:
                    word = OTHERS.sub("", self.text[self.at : match.start()])
                    if MARKERS.search(word) or len(word) > LONGEST_NAME:
                        return None
                    self.at = match.end()
                    return word, match[0]
                if self.ended or len(self.text) - self.at > LONGEST_NAME + stops.longest:
                    return None
                yield
        finally:
            self.release(before)

    # ---- JSON

    def read_json(self, emit: Callable[[str], None]) -> Steps:
        """Emits one JSON value, in pieces. Returns False if the text isn't JSON, or is cut off."""
        yield from self.skip_space()
        if not (yield from self.need(1)):
            return False
        first = self.text[self.at]
        if first == '"':
            self.at += 1
            emit('"')
            return (yield from self._read_string(emit))
        if first not in "{[":
            return (yield from self.read_scalar(emit))
        closing: list[str] = []
        while True:
            match = _OUTSIDE_STRING.search(self.text, self.at)
            if match is None:
                emit(self.text[self.at :])
                self.at = len(self.text)
                if self.ended:
                    return False
                yield
                continue
            char = match[0]
            if char >= FIRST_MARKER:
                emit(self.text[self.at : match.start()])
                self.at = match.start()
                return False
            emit(self.text[self.at : match.end()])
            self.at = match.end()
            if char == '"':
                if not (yield from self._read_string(emit)):
                    return False
            elif char in "{[":
                closing.append("}" if char == "{" else "]")
            elif closing.pop() != char:
                return False
            elif not closing:
                return True

    def _read_string(self, emit: Callable[[str], None]) -> Steps:
        """Emits the rest of a string and its closing quote. A marker in a string is text; a control character is
        escaped.

        Returns False if the string is cut off.
        """
        while True:
            text = self.text
            match = _IN_STRING.search(text, self.at)
            if match is None:
                emit(text[self.at :])
                self.at = len(text)
                if self.ended:
                    return False
                yield
                continue
            emit(text[self.at : match.start()])
            self.at = match.start()
            char = match[0]
            if char == '"':
                self.at += 1
                emit('"')
                return True
            if char == "\\":
                if not (yield from self.need(2)):
                    emit(self.text[self.at :])
                    self.at = len(self.text)
                    return False
                escaped = self.text[self.at : self.at + 2]
                emit(escaped if escaped[1] < "\udc00" or escaped[1] > "\udfff" else "\\\\" + self.quoted(escaped[1]))
                self.at += 2
            else:
                self.at += 1
                emit(self.quoted(char))

    def read_scalar(self, emit: Callable[[str], None]) -> Steps:
        """Reads a number, true, false or null, and passes its text to ``emit``.

        Returns False if the text isn't one of these, or if the answer ends with it.
        """
        before, begin = self.hold(), self.at
        while True:
            match = _SCALAR.match(self.text, begin)
            end = begin if match is None else match.end()
            if end < len(self.text) or self.ended:
                break
            yield
        self.release(before)
        word = self.text[begin:end]
        self.at = end
        emit(word)
        return (word == "null" or json_value(word) is not None) and end < len(self.text)

    def read_text(self) -> Steps:
        """Reads a JSON string. Returns its text; None if no string follows."""
        if (yield from self.take('"')) is None:
            return None
        parts = ['"']
        if not (yield from self._read_string(parts.append)):
            return None
        try:
            return msgspec.json.decode("".join(parts), type=str)
        except msgspec.DecodeError:
            return None


def _is_space(char: str) -> bool:
    """Returns True for space, and for a token without text."""
    return char in _SPACE or "\ud800" <= char < FIRST_MARKER


def words(text: str) -> list[str]:
    """Returns a text's parts between which there may be space."""
    return _BETWEEN.sub(" ", text).split()


def ignore(text: str) -> None:
    """Drops a piece of text; for parameters such as ``emit``."""
