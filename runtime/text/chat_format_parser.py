"""Takes reasoning and tool calls out of token ids as they come: see ``ChatParser``.

A marker that is a token of the vocabulary counts where that token stands, and nowhere else. To keep the two apart, each
such token becomes one lone surrogate in the text that is parsed: no token's own text can have one. So does any other
special token, from another range: it has no text, unless it stands in a call's text.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import json
import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec

from .chat_format_table import (
    Calls,
    GemmaCall,
    HarmonyCall,
    JsonCall,
    NamedCall,
    Reasoning,
    Spelling,
    TaggedCall,
)


class Vocabulary(Protocol):
    """What is asked of a ``Tokenizer``; it has each of these."""

    special_ids: frozenset[int]
    chat_codes: dict[Any, Any]

    @property
    def added_tokens(self) -> dict[str, int]:
        """Spelling -> id."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        ...

    def token_bytes(self, index: int) -> bytes:
        """The bytes that a token stands for."""
        ...


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: of its ``reasoning``, of its ``content``, or of the call of index ``call``.

    Attributes:
        call: which call; None for a piece of text.
        id: of the call, where the format has one; in the call's first piece.
        name: of the tool; in the call's first piece, and in no other.
        arguments: a piece of the arguments, which together are JSON.
    """

    content: str = ""
    reasoning: str = ""
    call: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class ToolCall:
    """A call.

    Attributes:
        arguments: JSON text, an object where the call is complete.
        id: None where the format has none.
        complete: False for a call that was cut off, or whose arguments aren't JSON.
    """

    name: str
    arguments: str
    id: str | None = None
    complete: bool = True


@dataclass(frozen=True)
class Message:
    """An answer in its parts.

    Attributes:
        content, reasoning: None where there is none.
        complete: False where it was cut off within its reasoning or within a call.
    """

    content: str | None = None
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    complete: bool = True


Steps = Generator[None, None, Any]
"""A part of the parser: it yields where it needs more text."""

_Part = TypeVar("_Part")

_FIRST_SURROGATE = 0xDC00
_FIRST_OTHER = 0xD800
_MOST_OTHERS = 0x400
_MARKERS = re.compile("[\ud800-\udfff]")
_OTHERS = re.compile("[\ud800-\udbff]")
_OUTSIDE = re.compile('["{}\\[\\]\udc00-\udfff]')
_INSIDE = re.compile('["\\\\\x00-\x1f\ud800-\udfff]')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_PYTHON = re.compile("""["'()\\[\\]{},\udc00-\udfff]""")
_SPACE = " \n\r\t"
_BETWEEN = re.compile("(?<=[>\udc00-\udfff])(?=[<\udc00-\udfff])")
_MARKER_LIKE = re.compile(r"[<\[|｜].*[>\]|｜]", re.DOTALL)
_LONGEST_NAME = 256
_DEEPEST = 100
"""Values within values of Gemma's notation."""
_LONGEST_LITERAL = 100_000
"""Characters of a Python value; the longest that is evaluated."""


class _Coded:
    """A format over a tokenizer: its markers that are tokens are surrogates.

    Attributes:
        spelling: the format, with surrogates in its texts.
        surrogates: token id -> its surrogate.
        pieces: token id -> its text, or its bytes where these aren't whole characters.
    """

    def __init__(self, spelling: Spelling, tokenizer: Vocabulary) -> None:
        texts = list(_texts(spelling))
        added = tokenizer.added_tokens
        used = {
            content: index
            for content, index in added.items()
            if (index in tokenizer.special_ids or _MARKER_LIKE.fullmatch(content))
            and any(content in text for text in texts)
        }
        self.surrogates = {index: chr(_FIRST_SURROGATE + i) for i, index in enumerate(used.values())}
        self._codes = {content: self.surrogates[index] for content, index in used.items()}
        self._pattern = re.compile("|".join(map(re.escape, sorted(used, key=len, reverse=True))) or "(?!)")
        self.spelled = {self.surrogates[index]: content for content, index in used.items()}
        self.shown = {
            self.surrogates[index]: "" if index in tokenizer.special_ids else content for content, index in used.items()
        }
        self.spelling = self._coded(spelling)
        self.pieces: dict[int, str | bytes] = {}
        self._lock = threading.Lock()
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        self._end = tokenizer.eos_token_id

    def code(self, text: str) -> str:
        """The text with surrogates for markers."""
        return self._pattern.sub(lambda found: self._codes[found[0]], text)

    def piece(self, token: int) -> str | bytes:
        """What a token becomes."""
        found: str | bytes | None = self.surrogates.get(token)
        if found is None and token in self._special:
            with self._lock:  # parsers of other threads have the same
                found = self.surrogates.get(token) or self._other(token)
        elif found is None:
            found = self._tokenizer.token_bytes(token)
            with contextlib.suppress(UnicodeDecodeError):
                found = found.decode()
        assert found is not None
        self.pieces[token] = found
        return found

    def _other(self, token: int) -> str:
        """The surrogate of a special token that isn't a marker."""
        number = len(self.spelled) - len(self._codes)
        if token == self._end or number >= _MOST_OTHERS:
            return ""
        found = chr(_FIRST_OTHER + number)
        self.spelled[found] = self._tokenizer.token_bytes(token).decode(errors="replace")
        self.shown[found] = ""
        self.surrogates[token] = found
        return found

    def _coded(self, part: _Part) -> _Part:
        if isinstance(part, str):
            return self.code(part)  # type: ignore[return-value]
        if isinstance(part, tuple):
            return tuple(self._coded(one) for one in part)  # type: ignore[return-value]
        if is_dataclass(part) and not isinstance(part, type):
            return replace(part, **{one.name: self._coded(getattr(part, one.name)) for one in fields(part)})
        return part


def _texts(part: Any) -> Generator[str, None, None]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, tuple):
        for one in part:
            yield from _texts(one)
    elif is_dataclass(part):
        for one in fields(part):
            yield from _texts(getattr(part, one.name))


def coded(spelling: Spelling, tokenizer: Vocabulary) -> _Coded:
    """The format over this tokenizer, which keeps it."""
    found = tokenizer.chat_codes.get(spelling)
    if found is None:
        found = tokenizer.chat_codes[spelling] = _Coded(spelling, tokenizer)
    return found


class _Stops:
    """Texts that end another text: what finds the first of them, and what may be the beginning of one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(dict.fromkeys(text for text in texts if text))
        self.pattern = re.compile("|".join(map(re.escape, sorted(self.texts, key=len, reverse=True))) or "(?!)")
        self.longest = max(map(len, self.texts), default=1) - 1
        self.begins = frozenset(text[:n] for text in self.texts for n in range(1, len(text)))
        self._first = {text[0] for text in self.texts if len(text) > 1}

    def held(self, text: str, at: int) -> int:
        """Where the longest end of the text is that may be the beginning of a stop."""
        for start in range(max(at, len(text) - self.longest), len(text)):
            if text[start] in self._first and text[start:] in self.begins:
                return start
        return len(text)


class ChatParser:
    """Parses one answer.

    ``push`` takes token ids as they come, however many, and gives what is sure by then; ``finish`` gives the rest. The
    pieces together are ``message``, for every way of cutting the tokens.

    What isn't a call although it begins like one, as its name can't be read, is content as it stands there. Space
    around reasoning and before a call isn't part of any text.

    Args:
        spelling: the format.
        tokenizer: the model's.
        tools: JSON schemas of the tools that are offered: parameters between tags get their types from these, and a
            format without markers calls no others.
        reasoning_open: the prompt ends within the reasoning.
    """

    def __init__(
        self,
        spelling: Spelling,
        tokenizer: Vocabulary,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_open: bool = False,
    ) -> None:
        self._coded = coded(spelling, tokenizer)
        self._format = self._coded.spelling
        self._pieces = self._coded.pieces
        self._schemas = _schemas(tools)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._undecoded = False
        self._text = ""
        self._at = 0
        self._keep: int | None = None  # where a part may return to
        self._ended = False
        self._deltas: list[Delta] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._held = ""  # space that is out only if text follows
        self._trim = False  # space before the next text isn't part of it
        self._names: list[str] = []
        self._ids: list[str | None] = []
        self._arguments: list[list[str]] = []
        self._done: list[bool] = []
        self._in_reasoning = reasoning_open
        self._cut = False
        self._steps = self._harmony() if self._is_harmony else self._answer()
        self._over = False
        self._advance()

    @property
    def _is_harmony(self) -> bool:
        return self._format.calls is not None and isinstance(self._format.calls.call, HarmonyCall)

    @property
    def in_reasoning(self) -> bool:
        """Whether the answer is within its reasoning."""
        return self._in_reasoning

    def push(self, token_ids: Sequence[int]) -> list[Delta]:
        """What these tokens complete."""
        pieces = self._pieces
        for token in token_ids:
            piece = pieces.get(token)
            if piece is None:
                piece = self._coded.piece(token)
            if not self._undecoded and type(piece) is str:
                self._text += piece
            elif type(piece) is str and piece and token in self._coded.surrogates:
                self._text += self._decoder.decode(b"", True) + piece
                self._decoder.reset()
                self._undecoded = False
            else:
                self._text += self._decoder.decode(piece.encode() if type(piece) is str else piece)  # type: ignore[arg-type]
                self._undecoded = bool(self._decoder.getstate()[0])
        self._advance()
        return self._taken()

    def finish(self) -> list[Delta]:
        """What was held back; no token comes any more."""
        if not self._ended:
            self._text += self._decoder.decode(b"", True)
            self._ended = True
            self._advance()
        return self._taken()

    @property
    def message(self) -> Message:
        """The answer so far, in its parts."""
        calls = tuple(
            ToolCall(name, "".join(arguments), key, done)
            for name, key, arguments, done in zip(self._names, self._ids, self._arguments, self._done, strict=True)
        )
        return Message(
            "".join(self._content) or None,
            "".join(self._reasoning) or None,
            calls,
            complete=not self._cut and not self._in_reasoning and all(self._done),
        )

    def _advance(self) -> None:
        if not self._over:
            try:
                next(self._steps)
            except StopIteration:
                self._over = True
        if self._keep is None and self._at:
            self._text = self._text[self._at :]
            self._at = 0

    def _taken(self) -> list[Delta]:
        found, self._deltas = self._deltas, []
        return found

    # What comes out.

    def _say(self, text: str) -> None:
        """A piece of content."""
        if _MARKERS.search(text):
            text = _MARKERS.sub(lambda found: self._coded.shown[found[0]], text)
        self._speak(text, self._content, "content")

    def _think(self, text: str) -> None:
        """A piece of reasoning."""
        if _MARKERS.search(text):
            text = self._spell(text)
        self._speak(text, self._reasoning, "reasoning")

    def _speak(self, text: str, parts: list[str], kind: str) -> None:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        body = text.rstrip()
        if not body:
            self._held += text
            return
        piece = self._held + body
        self._held = text[len(body) :]
        parts.append(piece)
        last = self._deltas[-1] if self._deltas else None
        if last is not None and getattr(last, kind):
            self._deltas[-1] = Delta(**{kind: getattr(last, kind) + piece})
        else:
            self._deltas.append(Delta(content=piece) if kind == "content" else Delta(reasoning=piece))

    def _spell(self, text: str) -> str:
        return _MARKERS.sub(lambda found: self._coded.spelled[found[0]], text)

    def _begin_call(self, name: str, key: str | None = None) -> None:
        self._deltas.append(Delta(call=len(self._names), id=key, name=name))
        self._names.append(name)
        self._ids.append(key)
        self._arguments.append([])
        self._done.append(False)

    def _argue(self, text: str) -> None:
        """A piece of the last call's arguments."""
        if _OTHERS.search(text):
            text = _OTHERS.sub("", text)
        if not text:
            return
        index = len(self._names) - 1
        self._arguments[index].append(text)
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.call == index:
            self._deltas[-1] = replace(last, arguments=last.arguments + text)
        else:
            self._deltas.append(Delta(call=index, arguments=text))

    def _argue_text(self, text: str) -> None:
        """A piece of a text in the last call's arguments."""
        self._argue(self._quoted(text))

    def _end_call(self) -> None:
        self._done[-1] = isinstance(_any_json("".join(self._arguments[-1])), dict)

    # What is read.

    def _need(self, n: int) -> Steps:
        """Waits for so many characters; False where the answer ends before."""
        while len(self._text) - self._at < n:
            if self._ended:
                return False
            yield
        return True

    def _skip_space(self) -> Steps:
        while (yield from self._need(1)) and _is_space(self._text[self._at]):
            self._at += 1

    def _peek(self, texts: Sequence[str]) -> Steps:
        """Which of these texts stands here, the longest; None if none does."""
        found = None
        for text in sorted(texts, key=len, reverse=True):
            n = 1
            while n <= len(text) and (yield from self._need(n)):
                if self._text[self._at + n - 1] != text[n - 1]:
                    break
                n += 1
            if n > len(text):
                found = text
                break
        return found

    def _take(self, *texts: str) -> Steps:
        """Takes one of these texts if it stands here."""
        found = yield from self._peek(texts)
        if found is not None:
            self._at += len(found)
        return found

    def _take_parts(self, text: str) -> Steps:
        """Takes a text with any space between its words; False, and nothing, if another stands here."""
        start, kept = self._at, self._keep
        if kept is None:
            self._keep = start
        for part in _words(text):
            yield from self._skip_space()
            if (yield from self._take(part)) is None:
                self._at = start
                self._keep = kept
                return False
        self._keep = kept
        return True

    def _until(self, stops: _Stops, emit: Callable[[str], None], *, whole: bool = False) -> Steps:
        """Gives out the text up to the first stop, which is taken; None where the answer ends before.

        A stop that breaks off at the answer's end is text, unless a marker is part of it, or ``whole`` stops come.
        """
        while True:
            text = self._text
            found = stops.pattern.search(text, self._at)
            if found is not None:
                emit(text[self._at : found.start()])
                self._at = found.end()
                return found[0]
            sure = stops.held(text, self._at)
            if self._ended and not (whole or _MARKERS.search(text, sure)):
                sure = len(text)
            if sure > self._at:
                emit(text[self._at : sure])
                self._at = sure
            if self._ended:
                self._cut = self._cut or sure < len(text)
                self._at = len(text)
                return None
            yield
            if self._keep is None and self._at:
                self._text, self._at = self._text[self._at :], 0

    def _word(self, stops: _Stops, most: int = _LONGEST_NAME) -> Steps:
        """A short text up to a stop, and the stop; None where there is none so near."""
        parts: list[str] = []
        start, kept = self._at, self._keep
        if kept is None:
            self._keep = start
        try:
            while True:
                found = stops.pattern.search(self._text, self._at)
                if found is not None:
                    word = _OTHERS.sub("", self._text[self._at : found.start()])
                    if _MARKERS.search(word) or len(word) > most:
                        return None
                    self._at = found.end()
                    return "".join([*parts, word]), found[0]
                if self._ended or len(self._text) - self._at > most + stops.longest:
                    return None
                yield
        finally:
            self._keep = kept

    # JSON

    def _json(self, emit: Callable[[str], None]) -> Steps:
        """Gives out one JSON value as it comes; False where it isn't one, or is cut off."""
        yield from self._skip_space()
        if not (yield from self._need(1)):
            return False
        first = self._text[self._at]
        if first == '"':
            self._at += 1
            emit('"')
            return (yield from self._json_string(emit))
        if first not in "{[":
            return (yield from self._json_scalar(emit))
        closing: list[str] = []
        while True:
            found = _OUTSIDE.search(self._text, self._at)
            if found is None:
                emit(self._text[self._at :])
                self._at = len(self._text)
                if self._ended:
                    return False
                yield
                continue
            char = found[0]
            if char >= "\udc00":
                emit(self._text[self._at : found.start()])
                self._at = found.start()
                return False
            emit(self._text[self._at : found.end()])
            self._at = found.end()
            if char == '"':
                if not (yield from self._json_string(emit)):
                    return False
            elif char in "{[":
                closing.append("}" if char == "{" else "]")
            elif closing.pop() != char:
                return False
            elif not closing:
                return True

    def _json_string(self, emit: Callable[[str], None]) -> Steps:
        """The rest of a string, its end included. A marker in it is text; a control character is escaped."""
        while True:
            text = self._text
            found = _INSIDE.search(text, self._at)
            if found is None:
                emit(text[self._at :])
                self._at = len(text)
                if self._ended:
                    return False
                yield
                continue
            emit(text[self._at : found.start()])
            self._at = found.start()
            char = found[0]
            if char == '"':
                self._at += 1
                emit('"')
                return True
            if char == "\\":
                if not (yield from self._need(2)):
                    emit(self._text[self._at :])
                    self._at = len(self._text)
                    return False
                escaped = self._text[self._at : self._at + 2]
                emit(escaped if escaped[1] < "\udc00" or escaped[1] > "\udfff" else "\\\\" + self._quoted(escaped[1]))
                self._at += 2
            else:
                self._at += 1
                emit(self._quoted(char))

    def _quoted(self, text: str) -> str:
        """A text as it stands in a JSON string."""
        if _MARKERS.search(text):
            text = self._spell(text)
        return json.dumps(text, ensure_ascii=False)[1:-1]

    def _json_scalar(self, emit: Callable[[str], None]) -> Steps:
        start, kept = self._at, self._keep
        if kept is None:
            self._keep = start
        begin = self._at
        while True:
            found = _SCALAR.match(self._text, begin)
            end = begin if found is None else found.end()
            if end < len(self._text) or self._ended:
                break
            yield
        self._keep = kept
        word = self._text[begin:end]
        self._at = end
        emit(word)
        return _is_json(word) and (end < len(self._text))

    # Answers

    def _answer(self) -> Steps:
        reasoning, calls = self._format.reasoning, self._format.calls
        begin = reasoning.begin.strip() if reasoning else ""
        end = reasoning.end.strip() if reasoning else ""
        openers = self._openers(calls)
        if reasoning is not None and self._in_reasoning:
            if (yield from self._reason(reasoning, openers)) and calls is not None:
                yield from self._called(calls, "")
        elif begin:
            yield from self._skip_space_held()
            if (yield from self._take(begin)) is not None:
                self._held = ""
                if (yield from self._reason(reasoning, openers)) and calls is not None:  # type: ignore[arg-type]
                    yield from self._called(calls, "")
            elif self._ended and _MARKERS.match(begin) and begin.startswith(self._text[self._at :] or " "):
                self._at = len(self._text)
                self._in_reasoning = True  # it broke off within the reasoning's beginning
        if calls is not None and calls.bare:
            yield from self._skip_space_held()
            if (yield from self._bare(calls)):
                self._held = ""
        again = [one for one in (begin, end) if len(one) == 1 and _MARKERS.match(one)]
        stops = _Stops([*openers, *again])
        while (stop := (yield from self._until(stops, self._say))) is not None:
            if stop in openers and calls is not None:
                yield from self._called(calls, stop)
            elif stop == begin and reasoning is not None:
                yield from self._reason(reasoning, openers)
            elif stop == end:
                self._trim = not self._content
        self._say_space()

    def _say_space(self) -> None:
        """Space at the end of an answer without calls is part of it."""
        if self._held and not self._names and not self._trim and not self._in_reasoning:
            self._content.append(self._held)
            self._deltas.append(Delta(content=self._held))
        self._held = ""

    def _skip_space_held(self) -> Steps:
        """Space before an answer stands in it only if text follows."""
        while (yield from self._need(1)) and _is_space(self._text[self._at]):
            self._held += _OTHERS.sub("", self._text[self._at])
            self._at += 1

    def _openers(self, calls: Calls | None) -> tuple[str, ...]:
        """The texts that calls begin with."""
        if calls is None:
            return ()
        if calls.bare:
            return calls.marker
        first = (calls.section or calls.begin).split()[0]
        if isinstance(calls.call, TaggedCall) and calls.begin and calls.call.name_begin:
            return first, calls.call.name_begin.split()[0]  # models forget the first
        return (first,)

    def _reason(self, reasoning: Reasoning, openers: tuple[str, ...]) -> Steps:
        """The reasoning up to its end; True if a call ended it."""
        self._in_reasoning = True
        self._trim = True
        self._held = ""
        if self._reasoning:
            self._reasoning.append("\n")
            self._deltas.append(Delta(reasoning="\n"))
        end = reasoning.end.strip()
        calls = openers[:1] if reasoning.calls_end and len(openers[0]) == 1 else ()
        stop = yield from self._until(_Stops([end, *calls]), self._think)
        self._held = ""
        if stop is None:
            return False
        self._in_reasoning = False
        self._trim = True
        return stop in calls

    # Calls

    def _called(self, calls: Calls, opener: str) -> Steps:
        """The calls behind an opener; what can't be read of them is content."""
        first = (calls.section or calls.begin).split()
        if calls.bare:
            yield from self._bare(calls)
            return
        named = bool(opener) and [opener] != first[:1]  # models forget the marker before the name
        if not named:
            rest = " ".join(first[1:])
            if rest and not (yield from self._take_parts(rest)):
                self._nameless(opener, "", rest)
                return
        if calls.section:
            yield from self._section(calls)
        else:
            yield from self._one(calls, opener, named=named)

    @property
    def _at_end(self) -> bool:
        return self._ended and not _OTHERS.sub("", self._text[self._at :]).strip()

    def _section(self, calls: Calls) -> Steps:
        number = 0
        while True:
            yield from self._skip_space()
            if self._at_end:
                self._cut = True
                return
            if calls.section_end and (yield from self._take_parts(calls.section_end)):
                return
            if number and calls.separator.strip():
                yield from self._take_parts(calls.separator)
            if calls.begin and not (yield from self._take_parts(calls.begin)):
                if self._broke_off(calls.begin) or self._broke_off(calls.section_end):
                    return
                found = yield from self._until(_Stops([calls.begin, calls.section_end]), _nothing)
                if found != calls.begin:
                    self._cut = self._cut or self._ended
                    return
            if not (yield from self._one(calls, calls.begin)) and not calls.begin:
                return
            number += 1

    def _one(self, calls: Calls, opener: str, *, named: bool = False) -> Steps:
        """One call up to its end; True if it was one."""
        call = calls.call
        if isinstance(call, JsonCall):
            whole = yield from self._json_call(call, opener)
        elif isinstance(call, NamedCall):
            whole = yield from self._named_call(calls, call, opener)
        elif isinstance(call, TaggedCall):
            whole = yield from self._tagged_call(calls, call, opener, named=named)
        elif isinstance(call, GemmaCall):
            whole = yield from self._gemma_call(call, opener)
        else:
            raise AssertionError(call)
        if whole is None:
            return False
        if whole:
            self._end_call()
        end = calls.end.strip()
        if whole and (not end or (yield from self._take_parts(end)) or not self._at_end):
            return True
        if not whole:
            tag = call.end.strip() if isinstance(call, TaggedCall) else ""
            yield from self._until(_Stops([end, calls.section_end.strip()] if end else [tag]), _nothing)
        return whole

    def _broke_off(self, expected: str) -> bool:
        """Whether the answer ends here with no more than the beginning of what is expected."""
        left = "".join(_OTHERS.sub("", self._text[self._at :]).split())
        if not self._ended or not "".join(expected.split()).startswith(left):
            return False
        self._at = len(self._text)
        self._cut = True
        return True

    def _nameless(self, opener: str, raw: str, expected: str = "") -> None:
        """What isn't a call: content, unless the answer ends there."""
        if self._broke_off(expected):
            return
        if self._at_end:
            self._cut = True
        else:
            self._say(self._spell(opener + raw))

    def _json_call(self, call: JsonCall, opener: str, *, known: bool = False) -> Steps:
        """A call that is a JSON object. None if it isn't one; False if it is cut off."""
        start, kept = self._at, self._keep
        if kept is None:
            self._keep = start
        name: str | None = None
        own_id: str | None = None
        early: list[str] = []  # arguments that come before the name
        argued = False
        whole = False
        yield from self._skip_space()
        if (yield from self._take("{")) is not None:
            while True:
                yield from self._skip_space()
                key = yield from self._text_value()
                yield from self._skip_space()
                if key is None or (yield from self._take(":")) is None:
                    break
                if known and name is None and key not in (call.name, "type", "id", *call.arguments):
                    break
                yield from self._skip_space()
                if key == call.name and name is None:
                    name = yield from self._text_value()
                    if name is None or (known and self._schemas is not None and name not in self._schemas):
                        name = None
                        break
                    if not known:
                        self._keep = kept
                        self._begin_call(name, own_id)
                        for piece in early:
                            self._argue(piece)
                elif key in call.arguments and not argued:
                    argued = True
                    emit = self._argue if name is not None and not known else early.append
                    if (yield from self._need(1)) and self._text[self._at] == '"':
                        coded = yield from self._text_value()
                        if coded is None:
                            break
                        emit(coded)
                    else:
                        if known and name is not None:
                            self._keep = kept
                            self._begin_call(name, own_id)
                            known = False
                            emit = self._argue
                        if not (yield from self._json(emit)):
                            break
                elif key == "id" and (yield from self._need(1)) and self._text[self._at] == '"':
                    own_id = yield from self._text_value()
                    if own_id is None:
                        break
                elif not (yield from self._json(lambda text: None)):
                    break
                yield from self._skip_space()
                if (yield from self._take(",")) is not None:
                    continue
                whole = (yield from self._take("}")) is not None
                break
        if known and name is not None and whole and argued:
            self._begin_call(name, own_id)
            for piece in early:
                self._argue(piece)
            known = False
        if name is None or known:
            raw = self._text[start : self._at]
            self._keep = kept
            if known:
                self._at = start
            else:
                self._nameless(opener, raw)
            return None
        self._keep = kept
        if whole and not argued:
            self._argue("{}")
        return whole

    def _text_value(self) -> Steps:
        """A JSON string's text; None if there is none."""
        if (yield from self._take('"')) is None:
            return None
        parts = ['"']
        if not (yield from self._json_string(parts.append)):
            return None
        try:
            return msgspec.json.decode("".join(parts), type=str)
        except msgspec.DecodeError:
            return None

    def _named_call(self, calls: Calls, call: NamedCall, opener: str) -> Steps:
        start, kept = self._at, self._keep
        if kept is None:
            self._keep = start
        middle = call.middle.split()
        found = yield from self._word(_Stops([middle[0], call.id]))
        own_id: str | None = None
        word = ""
        if found is not None:
            word, stop = found
            if call.id and stop == call.id:
                found = yield from self._word(_Stops([middle[0]]))
                own_id = None if found is None else found[0].strip()
        self._keep = kept
        word = word.strip()
        if call.index and call.index in word:
            own_id = word
            word = word.rpartition(call.index)[0]
        name = word.removeprefix(call.prefix)
        if found is None or not name or (middle[1:] and not (yield from self._take_parts(" ".join(middle[1:])))):
            if found is None and self._ended:
                self._at = len(self._text)
            if self._keep is None or self._keep <= start:
                self._nameless(opener, "")
            return None
        self._begin_call(name, own_id)
        yield from self._skip_space()
        if (yield from self._peek(("{",))) is None:
            return False
        if not (yield from self._json(self._argue)):
            return False
        if call.after:
            yield from self._take_parts(call.after)
        return True

    def _tagged_call(self, calls: Calls, call: TaggedCall, opener: str, *, named: bool) -> Steps:
        if call.name_begin:
            begin = call.name_begin.split()
            rest = " ".join(begin[1:]) if named else call.name_begin
            if rest and not (yield from self._take_parts(rest)):
                if not self._broke_off(calls.section_end or rest):
                    self._nameless(opener, "", rest)
                return None
        name_end = call.name_end.strip() or "\n"
        alone = name_end[:-1] + "/>" if name_end.endswith(">") else ""  # a call without parameters
        stops = [name_end, alone]
        if not call.name_begin:
            stops += [call.key_begin, calls.end.strip()]
        found = yield from self._word(_Stops(stops))
        name = "" if found is None else found[0].strip()
        if not name:
            if found is None and self._ended:
                self._at = len(self._text)
            self._nameless(opener, "")
            return None
        if found[1] in (call.key_begin, calls.end.strip()) and not call.name_begin:
            self._at -= len(found[1])
        self._begin_call(name)
        if found[1] == alone:
            self._argue("{}")
            return True
        properties, document = self._properties(name)
        number = 0
        self._argue("{")
        while True:
            yield from self._skip_space()
            if (yield from self._take_parts(call.key_begin)):
                if not (yield from self._parameter(calls, call, properties, document, number)):
                    return False
                number += 1
            elif call.end:
                if not (yield from self._take_parts(call.end)):
                    return False
                break
            elif (yield from self._peek((calls.end.strip(),))) is None:
                return False
            else:
                break
        self._argue("}")
        return True

    def _parameter(
        self, calls: Calls, call: TaggedCall, properties: Mapping[str, Any], document: Any, number: int
    ) -> Steps:
        """One parameter: its key and value as JSON."""
        is_text: bool | None = None
        ends = _words(call.key_end)
        found = yield from self._word(_Stops([call.typed or ends[0], ends[0]]))
        if found is None:
            return False
        key = found[0]
        if call.typed and found[1] == call.typed:
            found = yield from self._word(_Stops([ends[0]]))
            if found is None:
                return False
            is_text = found[0] == "true"
        for part in ends[1:]:
            if not (yield from self._take_parts(part)):
                return False
        framed = call.key_end.endswith("\n") and (yield from self._take("\n")) is not None
        value_end = call.value_end.strip()
        frame = "\n" if framed else ""
        followers = tuple(one for one in (call.key_begin, call.end or calls.end.strip()) if one)
        others = [frame + one for one in followers] if call.value_end.startswith("\n") else []
        last = "" if others else calls.end.strip()  # of a value that isn't closed, if nothing else follows
        stops = _Stops([frame + value_end, *others, last])
        schema = properties.get(key)
        if is_text is None:
            types = parameter_types(schema, document)
            is_text = types == {"string"}
        self._argue((", " if number else "") + json.dumps(key, ensure_ascii=False) + ": ")
        parts: list[str] = []
        if is_text:
            self._argue('"')
        emit: Callable[[str], None] = self._argue_text if is_text else parts.append
        empty = framed and (yield from self._take(value_end)) is not None
        while not empty:
            stop = yield from self._until(stops, emit, whole=True)
            if stop is None:
                return False
            if stop in others:
                self._at -= len(stop) - len(frame)
                break
            kept, here = self._keep, self._at
            if kept is None:
                self._keep = here
            yield from self._skip_space()
            expected = self._openers(calls) if stop == last else followers
            follows = (yield from self._peek(expected)) is not None
            if not follows and self._ended:  # here, or within what is expected
                left = _OTHERS.sub("", self._text[self._at :])
                follows = any(one.startswith(left) for one in (*expected, ""))
            self._at, self._keep = here, kept
            if follows:
                self._at -= len(stop) if stop == last else 0
                break
            emit(stop)
        if is_text:
            self._argue('"')
        else:
            self._argue(_typed("".join(map(self._spell, parts)), parameter_types(schema, document)))
        return True

    def _properties(self, name: str) -> tuple[Mapping[str, Any], Any]:
        document = (self._schemas or {}).get(name)
        found = document.get("properties") if isinstance(document, Mapping) else None
        return (found if isinstance(found, Mapping) else {}), document

    def _gemma_call(self, call: GemmaCall, opener: str) -> Steps:
        if not (yield from self._take_parts(call.prefix)):
            self._nameless(opener, "", call.prefix)
            return None
        found = yield from self._word(_Stops(["{"]))
        if found is None or not found[0].strip():
            if found is None and self._ended:
                self._at = len(self._text)
            self._nameless(opener + call.prefix, "")
            return None
        self._begin_call(found[0].strip())
        self._at -= 1
        return (yield from self._gemma_value(call))

    def _gemma_value(self, call: GemmaCall, depth: int = 0) -> Steps:
        if depth > _DEEPEST:
            return False
        yield from self._skip_space()
        if (yield from self._take(call.quote)) is not None:
            self._argue('"')
            if (yield from self._until(_Stops([call.quote]), self._argue_text)) is None:
                return False
            self._argue('"')
            return True
        if (yield from self._peek(('"',))) is not None:
            return (yield from self._json(self._argue))
        for begin, end in ("{", "}"), ("[", "]"):
            if (yield from self._take(begin)) is None:
                continue
            self._argue(begin)
            number = 0
            while True:
                yield from self._skip_space()
                if (yield from self._take(end)) is not None:
                    self._argue(end)
                    return True
                if number:
                    if (yield from self._take(",")) is None:
                        return False
                    self._argue(", ")
                    yield from self._skip_space()
                if begin == "{" and not (yield from self._gemma_key(call)):
                    return False
                if not (yield from self._gemma_value(call, depth + 1)):
                    return False
                number += 1
        return (yield from self._json_scalar(self._argue))

    def _gemma_key(self, call: GemmaCall) -> Steps:
        quoted = (yield from self._take(call.quote, '"')) or ""
        found = yield from self._word(_Stops([quoted + ":"]))
        if found is None:
            return False
        self._argue(json.dumps(found[0].strip(), ensure_ascii=False) + ": ")
        return True

    # Calls without markers

    def _bare(self, calls: Calls) -> Steps:
        """Calls where an answer begins, or behind a marker; False, and nothing, if there are none."""
        if calls.marker and (yield from self._take(*calls.marker)) is not None:
            yield from self._skip_space()
        call = calls.call
        if isinstance(call, JsonCall):
            found = yield from self._json_call(call, "", known=True)
            if found is None:
                return False
            while found:
                self._end_call()
                yield from self._skip_space()
                if not (yield from self._take_parts(calls.separator)):
                    return True
                found = yield from self._json_call(call, "", known=True)
            return True
        return (yield from self._python_calls(calls))

    def _python_calls(self, calls: Calls) -> Steps:
        start, kept = self._at, self._keep
        if kept is None:
            self._keep = start
        if (yield from self._take("[")) is None:
            self._keep = kept
            return False
        number = 0
        while True:
            yield from self._skip_space()
            found = yield from self._word(_Stops(["("]))
            name = "" if found is None else found[0].strip()
            if not _NAME.fullmatch(name) or (self._schemas is not None and name not in self._schemas):
                if not number:
                    self._at, self._keep = start, kept
                    return False
                self._cut = True
                return True
            self._keep = kept
            self._begin_call(name)
            number += 1
            if not (yield from self._python_arguments()):
                self._at = len(self._text) if self._ended else self._at
                return True
            self._end_call()
            yield from self._skip_space()
            if (yield from self._take(",")) is None:
                self._cut = self._cut or (yield from self._take("]")) is None
                return True

    def _python_arguments(self) -> Steps:
        """Arguments up to the closing parenthesis, as JSON."""
        self._argue("{")
        number = 0
        while True:
            yield from self._skip_space()
            if (yield from self._take(")")) is not None:
                self._argue("}")
                return True
            if number:
                if (yield from self._take(",")) is None:
                    return False
                yield from self._skip_space()
                if (yield from self._take(")")) is not None:
                    self._argue("}")
                    return True
            found = yield from self._word(_Stops(["="]))
            if found is None or not found[0].strip().isidentifier():
                return False
            value = yield from self._python_value()
            if value is None:
                return False
            self._argue((", " if number else "") + json.dumps(found[0].strip()) + ": " + value)
            number += 1

    def _python_value(self) -> Steps:
        """A Python value up to a comma or parenthesis behind it, as JSON; None if it isn't one."""
        parts: list[str] = []
        depth, quote = 0, ""
        while True:
            text = self._text
            found = (_PYTHON if not quote else _IN_PYTHON[quote]).search(text, self._at)
            if found is None:
                parts.append(text[self._at :])
                self._at = len(text)
                if self._ended:
                    return None
                yield
                continue
            parts.append(text[self._at : found.start()])
            self._at = found.start()
            char = found[0]
            if quote:
                if char == "\\" and not (yield from self._need(2)):
                    return None
                taken = self._text[self._at : self._at + (2 if char == "\\" else 1)]
                self._at += len(taken)
                parts.append({"\n": "\\n", "\r": "\\r"}.get(taken, taken))
                quote = "" if taken == quote else quote
                continue
            if char >= "\udc00":
                return None
            if char in ",)" and not depth:
                return _of_python("".join(map(self._spell, parts)))
            depth += (char in "([{") - (char in ")]}")
            quote = char if char in "\"'" else ""
            parts.append(char)
            self._at += 1

    # Harmony

    def _harmony(self) -> Steps:
        calls = self._format.calls
        assert calls is not None and isinstance(calls.call, HarmonyCall)
        call = calls.call
        ends = [call.end, call.call, call.stop, call.start]
        header_stops = _Stops([call.message, *ends])
        self._in_reasoning = False
        yield from self._skip_space()
        if (yield from self._peek((call.channel, "to=", call.start))) is None and not self._at_end:
            stop = yield from self._until(_Stops([call.start, call.end, call.stop]), self._say)
            if stop is None:
                return
        while True:
            header: list[str] = []
            stop = yield from self._until(header_stops, header.append)
            if stop is None:
                text = "".join(header).strip()
                self._cut = self._cut or bool(text)
                return
            if stop != call.message:
                continue
            text = "".join(header)
            _, _, rest = text.partition(call.channel)
            recipient = next(iter(re.findall(r"\bto=([^\s\udc00-\udfff]+)", text)), "")
            channel = (re.findall(r"\s*(\w*)", rest) or [""])[0]
            if recipient.startswith(call.prefix):
                self._begin_call(recipient.removeprefix(call.prefix))
                yield from self._skip_space()
                whole = (yield from self._peek(("{",))) is not None and (yield from self._json(self._argue))
                if whole:
                    self._end_call()
                if self._at_end:
                    return
                emit: Callable[[str], None] = _nothing
            elif recipient and recipient != "assistant":
                emit = _nothing
            elif channel == "analysis":
                self._between(self._reasoning, "reasoning")
                self._in_reasoning = True
                emit = self._think
            elif channel in ("final", "commentary"):
                self._between(self._content, "content")
                emit = self._say
            else:
                emit = _nothing
            stop = yield from self._until(_Stops(ends), emit)
            if stop is None:
                self._say_space()
                return
            self._in_reasoning = False
            self._held = ""

    def _between(self, parts: list[str], kind: str) -> None:
        """A line's end between two messages of one kind."""
        self._held = ""
        self._trim = True
        if parts:
            parts.append("\n")
            self._deltas.append(Delta(**{kind: "\n"}))  # type: ignore[arg-type]


_IN_PYTHON = {quote: re.compile(f"[{quote}\\\\\n\r]") for quote in "\"'"}


def _is_space(char: str) -> bool:
    """Whether it is space, or a token without text."""
    return char in _SPACE or "\ud800" <= char < "\udc00"


def _words(text: str) -> list[str]:
    """A text's parts between which there may be space."""
    return _BETWEEN.sub(" ", text).split()


def _nothing(text: str) -> None:
    """Drops a piece."""


def _schemas(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    """Name -> the schema of its arguments."""
    if tools is None:
        return None
    found = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            found[function["name"]] = function.get("parameters", function.get("input_schema"))
    return found


def parameter_types(schema: Any, document: Any, depth: int = 0) -> set[str]:
    """The JSON types that a schema allows, as far as it names them; empty if it names none."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = document
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return parameter_types(target, document, depth + 1)
    named = schema.get("type")
    found = {named} if isinstance(named, str) else set(named) if isinstance(named, (list, tuple)) else set()
    if not found:
        for choice in ("anyOf", "oneOf", "allOf"):
            for one in schema.get(choice) or ():
                found |= parameter_types(one, document, depth + 1)
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        found |= {_type_of(value) for value in values}
    if schema.get("nullable") is True:
        found.add("null")
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array"}
    return names.get(type(value), "object")


def _typed(text: str, types: set[str]) -> str:
    """A parameter's text as JSON of one of these types; of none that is known, as JSON if it is any."""
    word = text.strip()
    if word in ("null", "None") and (not types or "null" in types):
        return "null"
    if word.lower() in ("true", "false") and (not types or "boolean" in types):
        return word.lower()
    of_types = types - {"string"}
    if of_types or not types:
        found = _any_json(word)
        if found is not None and (not types or _fits(found, types)):
            return word
        if types & {"object", "array"} and (literal := _of_python(word)) is not None:
            return literal
    return json.dumps(text, ensure_ascii=False)


def _fits(value: Any, types: set[str]) -> bool:
    kind = _type_of(value)
    if kind == "string":
        return False  # the quotes are part of the text
    whole = kind == "number" and value.is_integer() and "integer" in types
    return kind in types or whole or (kind == "integer" and "number" in types)


def _any_json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):  # which deep nesting is
        return None


def _is_json(text: str) -> bool:
    return text == "null" or _any_json(text) is not None


def _of_python(text: str) -> str | None:
    """A Python literal as JSON."""
    word = text.strip()
    if word in ("true", "false", "null"):
        return word
    if len(word) > _LONGEST_LITERAL:
        return None
    try:
        found = json.dumps(ast.literal_eval(word), ensure_ascii=False, allow_nan=False)
        if _MARKERS.search(found):  # lone surrogates, which aren't text
            found = json.dumps(json.loads(found))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return found
