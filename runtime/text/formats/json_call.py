"""Calls that are JSON objects with a name and arguments: ``{"name": "f", "arguments": {"a": 1}}``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from .notation import Calls, Notation
from .reader import AnswerReader, Steps, ignore
from .rules import RuleWriter, json_rule, quoted


@dataclass(frozen=True)
class JsonCall(Notation):
    """A call is a JSON object that has a name and arguments: ``{"name": "f", "arguments": {"a": 1}}``.

    Attributes:
        arguments: keys of the arguments; the template writes the first.
        name: the key of the tool's name.
    """

    arguments: tuple[str, ...] = ("arguments", "parameters")
    name: str = "name"

    names: ClassVar[re.Pattern[str] | None] = None

    @property
    def lead(self) -> str:
        """The text between a call's marker and the tool's name, the same for all tools."""
        return f'{{"{self.name}": "'

    def rule(self, writer: RuleWriter, index: int, name: str, schema: dict[str, Any]) -> str:
        """Returns the grammar rule of a call from its name on. The arguments are those of `Notation.rule`."""
        before = f'{json.dumps(name, ensure_ascii=False)[1:]}, "{self.arguments[0]}": '
        return f'{quoted(before)} %json {json_rule(schema)} "}}"'

    def call_schema(self, name: str, schema: dict[str, Any]) -> dict[str, Any]:
        """Returns the JSON schema of a whole call."""
        properties = {self.name: {"const": name}, self.arguments[0]: schema}
        return {
            "type": "object",
            "properties": properties,
            "required": [*properties],
            "additionalProperties": False,
        }

    def read(self, reader: AnswerReader, calls: Calls, opener: str, *, named: bool = False) -> Steps:
        """Reads one call. The arguments are those of `Notation.read`."""
        return (yield from _CallReader(self, reader, offered=False).read(opener))

    def read_bare(self, reader: AnswerReader, calls: Calls) -> Steps:
        """Reads calls of offered tools without markers. Returns False, and takes nothing, if none follows."""
        whole = yield from _CallReader(self, reader, offered=True).read("")
        if whole is None:
            return False
        while whole:
            reader.end_call()
            yield from reader.skip_space()
            if not (yield from reader.take_words(calls.separator)):
                return True
            whole = yield from _CallReader(self, reader, offered=True).read("")
        return True


class _CallReader:
    """Reads one object, whose keys may be in any order.

    Args:
        offered: True if only an object with an offered tool's name and arguments is a call; of other objects nothing
            is consumed.
    """

    def __init__(self, call: JsonCall, reader: AnswerReader, *, offered: bool) -> None:
        self._call, self._reader, self._offered = call, reader, offered
        self._before = reader.hold()
        self._name: str | None = None
        self._id: str | None = None
        self._early: list[str] = []  # arguments that precede the call's beginning
        self._argued = False
        self._begun = False

    def read(self, opener: str) -> Steps:
        """Reads the object; see ``Notation.read``."""
        reader = self._reader
        start = reader.at
        yield from reader.skip_space()
        whole = (yield from reader.take("{")) is not None and (yield from self._read_members())
        if self._offered and not self._begun and whole and self._argued:
            self._begin()
        if not self._begun:
            raw = reader.text[start : reader.at]
            reader.release(self._before)
            if self._offered:
                reader.at = start
            else:
                reader.reject_call(opener, raw)
            return None
        reader.release(self._before)
        if whole and not self._argued:
            reader.add_arguments("{}")
        return whole

    def _begin(self) -> None:
        """Begins the call if its name is known."""
        if self._name is not None and not self._begun:
            self._begun = True
            self._reader.release(self._before)
            self._reader.begin_call(self._name, self._id)
            for piece in self._early:
                self._reader.add_arguments(piece)

    def _read_members(self) -> Steps:
        """Reads the members and the closing brace. Returns False if the object is cut off, or isn't a call."""
        reader = self._reader
        while True:
            yield from reader.skip_space()
            key = yield from reader.read_text()
            yield from reader.skip_space()
            if key is None or (yield from reader.take(":")) is None:
                return False
            if not (yield from self._read_member(key)):
                return False
            yield from reader.skip_space()
            if (yield from reader.take(",")) is None:
                return (yield from reader.take("}")) is not None

    def _read_member(self, key: str) -> Steps:
        """Reads the value of a key. Returns False if it is cut off, or the object isn't a call."""
        reader, call = self._reader, self._call
        if self._offered and self._name is None and key not in (call.name, "type", "id", *call.arguments):
            return False
        yield from reader.skip_space()
        if key == call.name and self._name is None:
            return (yield from self._read_name())
        if key in call.arguments and not self._argued:
            return (yield from self._read_arguments())
        if key == "id" and (yield from reader.need(1)) and reader.text[reader.at] == '"':
            self._id = yield from reader.read_text()
            return self._id is not None
        return (yield from reader.read_json(ignore))

    def _read_name(self) -> Steps:
        name = yield from self._reader.read_text()
        schemas = self._reader.schemas
        if name is None or (self._offered and schemas is not None and name not in schemas):
            return False
        self._name = name
        if not self._offered:
            self._begin()
        return True

    def _read_arguments(self) -> Steps:
        reader = self._reader
        self._argued = True
        if (yield from reader.need(1)) and reader.text[reader.at] == '"':  # JSON within a text
            text = yield from reader.read_text()
            if text is None:
                return False
            (reader.add_arguments if self._begun else self._early.append)(text)
            return True
        self._begin()
        return (yield from reader.read_json(reader.add_arguments if self._begun else self._early.append))
