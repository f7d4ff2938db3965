"""Calls that are Python, without markers: ``[f(a=1, b='x')]``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from .json_types import python_as_json
from .markers import FIRST_MARKER
from .notation import Calls, Notation
from .reader import AnswerReader, Steps, Stops
from .rules import RuleWriter, quoted
from .values import ValueRules, ValueStyle

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_OUTSIDE_STRING = re.compile("""["'()\\[\\]{},\udc00-\udfff]""")
_IN_STRING = {quote: re.compile(f"[{quote}\\\\\n\r]") for quote in "\"'"}
_ESCAPE = r"""\\(['"\\abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})"""
_TEXT = rf"""/'([^'\\\n\r]|{_ESCAPE})*'|"([^"\\\n\r]|{_ESCAPE})*"/"""


def _literal(text: str) -> str:
    return f"( {quoted(json.dumps(text, ensure_ascii=False))} | {quoted(repr(text))} )"


_STYLE = ValueStyle(
    true='"True"',
    false='"False"',
    null='"None"',
    separator="/, ?/",
    colon="/: ?/",
    text=_TEXT,
    any_key=_TEXT,
    literal=_literal,
    key=_literal,
)


@dataclass(frozen=True)
class PythonCall(Notation):
    """A call is Python: ``f(a=1, b='x')``."""

    names: ClassVar[re.Pattern[str] | None] = _NAME

    def rule(self, writer: RuleWriter, index: int, name: str, schema: dict[str, Any]) -> str:
        """Returns the grammar rule of a call from its name on. The arguments are those of `Notation.rule`."""
        values = ValueRules(writer, index, name, _STYLE)
        return f'{quoted(name + "(")} {values.keyword_arguments(schema)} ")"'

    def read_bare(self, reader: AnswerReader, calls: Calls) -> Steps:
        """Reads a list of calls of offered tools, such as ``[f(a=1), g()]``.

        Returns False, and takes nothing, if none follows.
        """
        start, before = reader.at, reader.hold()
        if (yield from reader.take("[")) is None:
            reader.release(before)
            return False
        number = 0
        while True:
            yield from reader.skip_space()
            match = yield from reader.read_word(Stops(["("]))
            name = "" if match is None else match[0].strip()
            if not _NAME.fullmatch(name) or (reader.schemas is not None and name not in reader.schemas):
                if not number:
                    reader.at = start
                    reader.release(before)
                    return False
                reader.cut = True
                return True
            reader.release(before)
            reader.begin_call(name)
            number += 1
            if not (yield from self._read_arguments(reader)):
                reader.at = len(reader.text) if reader.ended else reader.at
                return True
            reader.end_call()
            yield from reader.skip_space()
            if (yield from reader.take(",")) is None:
                reader.cut = reader.cut or (yield from reader.take("]")) is None
                return True

    def _read_arguments(self, reader: AnswerReader) -> Steps:
        """Reads arguments up to the closing parenthesis, and adds them as JSON. Returns False if they are malformed."""
        reader.add_arguments("{")
        number = 0
        while True:
            yield from reader.skip_space()
            if (yield from reader.take(")")) is not None:
                reader.add_arguments("}")
                return True
            if number:
                if (yield from reader.take(",")) is None:
                    return False
                yield from reader.skip_space()
                if (yield from reader.take(")")) is not None:
                    reader.add_arguments("}")
                    return True
            match = yield from reader.read_word(Stops(["="]))
            if match is None or not match[0].strip().isidentifier():
                return False
            value = yield from _read_value(reader)
            if value is None:
                return False
            reader.add_arguments((", " if number else "") + json.dumps(match[0].strip()) + ": " + value)
            number += 1


def _read_value(reader: AnswerReader) -> Steps:
    """Returns a Python value up to the comma or parenthesis after it, as JSON; None if it isn't one."""
    parts: list[str] = []
    depth, quote = 0, ""
    while True:
        text = reader.text
        match = (_OUTSIDE_STRING if not quote else _IN_STRING[quote]).search(text, reader.at)
        if match is None:
            parts.append(text[reader.at :])
            reader.at = len(text)
            if reader.ended:
                return None
            yield
            continue
        parts.append(text[reader.at : match.start()])
        reader.at = match.start()
        char = match[0]
        if quote:
            if char == "\\" and not (yield from reader.need(2)):
                return None
            piece = reader.text[reader.at : reader.at + (2 if char == "\\" else 1)]
            reader.at += len(piece)
            parts.append({"\n": "\\n", "\r": "\\r"}.get(piece, piece))
            quote = "" if piece == quote else quote
            continue
        if char >= FIRST_MARKER:
            return None
        if char in ",)" and not depth:
            return python_as_json("".join(map(reader.spell, parts)))
        depth += (char in "([{") - (char in ")]}")
        quote = char if char in "\"'" else ""
        parts.append(char)
        reader.at += 1
