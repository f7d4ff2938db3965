"""Calls that are JSON objects with a name and arguments: ``{"name": "f", "arguments": {"a": 1}}``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from .notation import Calls, Notation
from .reader import AnswerReader, Steps
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
        """The text before a tool's name."""
        return f'{{"{self.name}": "'

    def rule(self, writer: RuleWriter, index: int, name: str, schema: dict[str, Any]) -> str:
        """Returns the rule of a call from its name on."""
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
        """Reads one call."""
        return (yield from self._read(reader, opener))

    def read_bare(self, reader: AnswerReader, calls: Calls) -> Steps:
        """Reads calls without markers, of offered tools."""
        whole = yield from self._read(reader, "", offered=True)
        if whole is None:
            return False
        while whole:
            reader.end_call()
            yield from reader.skip_space()
            if not (yield from reader.take_words(calls.separator)):
                return True
            whole = yield from self._read(reader, "", offered=True)
        return True

    def _read(self, reader: AnswerReader, opener: str, *, offered: bool = False) -> Steps:
        """Reads one call; see ``Notation.read``.

        Args:
            offered: only an object with a name of an offered tool and arguments is a call; nothing is taken of others.
        """
        start, before = reader.at, reader.hold()
        name: str | None = None
        key_of_call: str | None = None
        early: list[str] = []  # arguments that precede the name
        argued = False
        whole = False
        begun = False

        def begin(tool: str) -> None:
            nonlocal begun
            begun = True
            reader.begin_call(tool, key_of_call)
            for piece in early:
                reader.add_arguments(piece)

        yield from reader.skip_space()
        if (yield from reader.take("{")) is not None:
            while True:
                yield from reader.skip_space()
                key = yield from reader.read_text()
                yield from reader.skip_space()
                if key is None or (yield from reader.take(":")) is None:
                    break
                unknown = key not in (self.name, "type", "id", *self.arguments)
                if offered and not begun and name is None and unknown:
                    break
                yield from reader.skip_space()
                if key == self.name and name is None:
                    name = yield from reader.read_text()
                    if name is None or (offered and reader.schemas is not None and name not in reader.schemas):
                        name = None
                        break
                    if not offered:
                        reader.release(before)
                        begin(name)
                elif key in self.arguments and not argued:
                    argued = True
                    if (yield from reader.need(1)) and reader.text[reader.at] == '"':
                        text = yield from reader.read_text()
                        if text is None:
                            break
                        (reader.add_arguments if begun else early.append)(text)
                    else:
                        if name is not None and not begun:
                            reader.release(before)
                            begin(name)
                        if not (yield from reader.read_json(reader.add_arguments if begun else early.append)):
                            break
                elif key == "id" and (yield from reader.need(1)) and reader.text[reader.at] == '"':
                    key_of_call = yield from reader.read_text()
                    if key_of_call is None:
                        break
                elif not (yield from reader.read_json(lambda text: None)):
                    break
                yield from reader.skip_space()
                if (yield from reader.take(",")) is not None:
                    continue
                whole = (yield from reader.take("}")) is not None
                break
        if offered and not begun and name is not None and whole and argued:
            begin(name)
        if not begun:
            raw = reader.text[start : reader.at]
            reader.release(before)
            if offered:
                reader.at = start
            else:
                reader.reject_call(opener, raw)
            return None
        reader.release(before)
        if whole and not argued:
            reader.add_arguments("{}")
        return whole
