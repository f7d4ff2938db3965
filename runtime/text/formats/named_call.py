"""Calls that are a name, then arguments in JSON: ``f[ARGS]{"a": 1}``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .notation import Calls, Notation
from .reader import AnswerReader, Steps, Stops
from .rules import RuleWriter, json_rule, quoted


@dataclass(frozen=True)
class NamedCall(Notation):
    """A call is a name, then its arguments in JSON: ``f[ARGS]{"a": 1}``.

    Attributes:
        middle: text between the name and the arguments.
        prefix: text before the name.
        index: text between the name and the call's number, if calls have numbers; name, text and number are the call's
            id.
        id: text between the name and the call's id, if calls have ids.
        after: text after the arguments.
    """

    middle: str
    prefix: str = ""
    index: str = ""
    id: str = ""
    after: str = ""

    @property
    def lead(self) -> str:
        """The text between a call's marker and the tool's name, the same for all tools."""
        return self.prefix

    def rule(self, writer: RuleWriter, index: int, name: str, schema: dict[str, Any]) -> str:
        """Returns the grammar rule of a call from its name on. The arguments are those of `Notation.rule`."""
        number = f"{quoted(self.index)} /[0-9]{{1,4}}/ " if self.index else ""
        before = f"{writer.as_written(name)} {number}{writer.as_written(self.middle)}"
        return f"{before} %json {json_rule(schema)} {writer.as_written(self.after)}".strip()

    def read(self, reader: AnswerReader, calls: Calls, opener: str, *, named: bool = False) -> Steps:
        """Reads one call. The arguments are those of `Notation.read`."""
        start, before = reader.at, reader.hold()
        middle = self.middle.split()
        match = yield from reader.read_word(Stops([middle[0], self.id]))
        key: str | None = None
        word = ""
        if match is not None:
            word, stop = match
            if self.id and stop == self.id:
                match = yield from reader.read_word(Stops([middle[0]]))
                key = None if match is None else match[0].strip()
        reader.release(before)
        word = word.strip()
        if self.index and self.index in word:
            key = word
            word = word.rpartition(self.index)[0]
        name = word.removeprefix(self.prefix)
        if match is None or not name or (middle[1:] and not (yield from reader.take_words(" ".join(middle[1:])))):
            if match is None and reader.ended:
                reader.at = len(reader.text)
            if reader.holds_from(start):
                reader.reject_call(opener)
            return None
        reader.begin_call(name, key)
        yield from reader.skip_space()
        if (yield from reader.peek(("{",))) is None:
            return False
        if not (yield from reader.read_json(reader.add_arguments)):
            return False
        if self.after:
            yield from reader.take_words(self.after)
        return True
