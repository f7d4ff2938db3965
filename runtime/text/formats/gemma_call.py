"""Calls as Gemma 4 writes them: ``call:f{a:<|"|>x<|"|>}``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .notation import Calls, Notation
from .reader import AnswerReader, Steps, Stops
from .rules import RuleWriter, quoted
from .values import ValueRules, ValueStyle

_MOST_DEPTH = 100
"""The most levels of nested values that are read."""


@dataclass(frozen=True)
class GemmaCall(Notation):
    """A call is a name and an object without quotes around keys, and with tokens around texts: ``f{a:<|"|>x<|"|>}``.

    Attributes:
        prefix: before the name.
        quote: before and after a text.
    """

    prefix: str = "call:"
    quote: str = '<|"|>'

    @property
    def lead(self) -> str:
        """The text between a call's marker and the tool's name, the same for all tools."""
        return self.prefix

    def rule(self, writer: RuleWriter, index: int, name: str, schema: dict[str, Any]) -> str:
        """Returns the grammar rule of a call from its name on. The arguments are those of `Notation.rule`."""
        quote = writer.as_written(self.quote)
        style = ValueStyle(
            true='"true"',
            false='"false"',
            null='"null"',
            separator='","',
            colon='":"',
            text=f"{quote} {writer.free_until(f'gemma_{index}', self.quote)}",
            any_key="/[A-Za-z_][\\w\\-]{0,63}/",
            literal=lambda text: f"{quote} {quoted(text) if text else ''} {quote}",
            key=quoted,
            sorted_keys=True,  # as its template writes them
        )
        return f"{quoted(name)} {ValueRules(writer, index, name, style).value(schema)}"

    def read(self, reader: AnswerReader, calls: Calls, opener: str, *, named: bool = False) -> Steps:
        """Reads one call. The arguments are those of `Notation.read`."""
        if not (yield from reader.take_words(self.prefix)):
            reader.reject_call(opener, expected=self.prefix)
            return None
        match = yield from reader.read_word(Stops(["{"]))
        if match is None or not match[0].strip():
            if match is None and reader.ended:
                reader.at = len(reader.text)
            reader.reject_call(opener + self.prefix)
            return None
        reader.begin_call(match[0].strip())
        reader.at -= 1
        return (yield from self._read_value(reader))

    def _read_value(self, reader: AnswerReader, depth: int = 0) -> Steps:
        if depth > _MOST_DEPTH:
            return False
        yield from reader.skip_space()
        if (yield from reader.take(self.quote)) is not None:
            reader.add_arguments('"')
            if (yield from reader.read_until(Stops([self.quote]), reader.add_quoted)) is None:
                return False
            reader.add_arguments('"')
            return True
        if (yield from reader.peek(('"',))) is not None:
            return (yield from reader.read_json(reader.add_arguments))
        for begin, end in ("{", "}"), ("[", "]"):
            if (yield from reader.take(begin)) is None:
                continue
            reader.add_arguments(begin)
            number = 0
            while True:
                yield from reader.skip_space()
                if (yield from reader.take(end)) is not None:
                    reader.add_arguments(end)
                    return True
                if number:
                    if (yield from reader.take(",")) is None:
                        return False
                    reader.add_arguments(", ")
                    yield from reader.skip_space()
                if begin == "{" and not (yield from self._read_key(reader)):
                    return False
                if not (yield from self._read_value(reader, depth + 1)):
                    return False
                number += 1
        return (yield from reader.read_scalar(reader.add_arguments))

    def _read_key(self, reader: AnswerReader) -> Steps:
        quote = (yield from reader.take(self.quote, '"')) or ""
        match = yield from reader.read_word(Stops([quote + ":"]))
        if match is None:
            return False
        reader.add_arguments(json.dumps(match[0].strip(), ensure_ascii=False) + ": ")
        return True
