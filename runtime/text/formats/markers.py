"""Markers that are tokens, as single characters of the parsed text.

A marker that is a token of the vocabulary counts only as that token, never as text of the same spelling. So each such
token becomes one lone surrogate, U+DC00 to U+DFFF, in the text that is parsed: no token's own text can contain one. Any
other special token becomes one of U+D800 to U+DBFF: it has no text, except within a call's text.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Generator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

_Format = TypeVar("_Format")
_Part = TypeVar("_Part")

FIRST_MARKER = "\udc00"
MARKERS = re.compile("[\ud800-\udfff]")
OTHERS = re.compile("[\ud800-\udbff]")
_FIRST_OTHER = 0xD800
_MOST_OTHERS = 0x400
_MARKER_LIKE = re.compile(r"[<\[|｜].*[>\]|｜]", re.DOTALL)


class Vocabulary(Protocol):
    """The part of a ``Tokenizer`` that formats need."""

    special_ids: frozenset[int]
    chat_codes: dict[Any, Any]

    @property
    def added_tokens(self) -> dict[str, int]:
        """Spelling of an added token -> its id."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text; None if there is none."""
        ...

    def token_bytes(self, index: int) -> bytes:
        """Returns the bytes of the text of token ``index``, which may be part of a character."""
        ...


class CodedFormat(Generic[_Format]):
    """A chat format whose texts are prepared for one tokenizer.

    Markers that are single tokens of the tokenizer, such as "<tool_call>", are replaced by surrogate characters in the
    texts, so that text of the same spelling isn't taken for a marker.

    Attributes:
        spelling: the format with surrogates in its texts.
        surrogates: the surrogate of each token id.
        pieces: the text of each token id, or its bytes if they aren't whole characters.
        spelled: the token's spelling for each surrogate.
        shown: the text that replaces each surrogate in content; empty for a special token.
    """

    def __init__(self, spelling: _Format, tokenizer: Vocabulary) -> None:
        texts = list(_texts(spelling))
        used = {
            content: index
            for content, index in tokenizer.added_tokens.items()
            if (index in tokenizer.special_ids or _MARKER_LIKE.fullmatch(content))
            and any(content in text for text in texts)
        }
        self.surrogates = {index: chr(ord(FIRST_MARKER) + i) for i, index in enumerate(used.values())}
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

    def piece(self, token: int) -> str | bytes:
        """Returns the text of a token, or its bytes if these aren't whole characters, and stores it in ``pieces``."""
        piece: str | bytes | None = self.surrogates.get(token)
        if piece is None and token in self._special:
            with self._lock:  # parsers of other threads share the table
                piece = self.surrogates.get(token) or self._other(token)
        elif piece is None:
            piece = self._tokenizer.token_bytes(token)
            with contextlib.suppress(UnicodeDecodeError):
                piece = piece.decode()
        assert piece is not None
        self.pieces[token] = piece
        return piece

    def _other(self, token: int) -> str:
        """Assigns a surrogate to a special token that isn't a marker."""
        number = len(self.spelled) - len(self._codes)
        if token == self._end or number >= _MOST_OTHERS:
            return ""
        surrogate = chr(_FIRST_OTHER + number)
        self.spelled[surrogate] = self._tokenizer.token_bytes(token).decode(errors="replace")
        self.shown[surrogate] = ""
        self.surrogates[token] = surrogate
        return surrogate

    def _coded(self, part: _Part) -> _Part:
        """Replaces markers by surrogates in all texts of a record."""
        if isinstance(part, str):
            return self._pattern.sub(lambda match: self._codes[match[0]], part)  # type: ignore[return-value]
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


def coded_format(spelling: _Format, tokenizer: Vocabulary) -> CodedFormat[_Format]:
    """Returns the format for this tokenizer, which caches it in ``chat_codes``."""
    known: CodedFormat[_Format] | None = tokenizer.chat_codes.get(spelling)
    if known is None:
        known = tokenizer.chat_codes[spelling] = CodedFormat(spelling, tokenizer)
    return known
