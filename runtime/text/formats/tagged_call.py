"""Calls that are a name and parameters between tags: ``<function=f><parameter=a>1</parameter></function>``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...shared.errors import RequestError, shown
from .json_types import listed_values, merged_object, parameter_types, text_pattern, typed_json
from .notation import Calls, Notation
from .reader import AnswerReader, Steps, Stops, words
from .rules import RuleWriter, json_rule, quoted, unmet


@dataclass(frozen=True)
class TaggedCall(Notation):
    """A tool call is a name and parameters between tags; a text parameter is written verbatim, others as JSON.

    Attributes:
        name_begin, name_end: texts around the name.
        key_begin, key_end: texts around a parameter's key; its value follows.
        value_end: text after the value.
        end: text after the parameters.
        typed: text after a key, such as ``" string="``; then follows "true" if the value is text, "false" if it is
            JSON.
    """

    name_begin: str
    name_end: str
    key_begin: str
    key_end: str
    value_end: str
    end: str
    typed: str = ""

    @property
    def lead(self) -> str:
        """The text between a call's marker and the tool's name, the same for all tools."""
        return self.name_begin

    @property
    def closing(self) -> str:
        """The text after a call's parameters."""
        return self.end

    def openers(self, calls: Calls) -> tuple[str, ...]:
        """Returns the texts that calls begin with: also the tag of the name, since models forget the marker before."""
        first = super().openers(calls)
        return (*first, self.name_begin.split()[0]) if calls.begin and self.name_begin else first

    # ---- grammar

    def rule(self, writer: RuleWriter, index: int, name: str, schema: dict[str, Any]) -> str:
        """Returns the grammar rule of a call from its name on. The arguments are those of `Notation.rule`.

        Raises RequestError for a key that can't be written in this notation.
        """
        parts = [writer.as_written(name + self.name_end)]
        merged = merged_object(schema, schema)
        properties, required = merged.get("properties") or {}, merged.get("required") or ()
        for k, (key, one) in enumerate(properties.items()):
            if one is False and key not in required:
                continue
            if not isinstance(key, str) or not key or re.search('[<>"\\s\x00-\x1f]', key):
                raise RequestError(
                    f"tools: {name}: the parameter {shown(key)} can't be written in this model's calls",
                    hint="Use letters, digits, _ and - alone.",
                )
            rule = writer.add(f"parameter_{index}_{k}", self._parameter(writer, f"value_{index}_{k}", key, one, schema))
            parts.append(rule if key in required else f"{rule}?")
        if "properties" not in merged and merged.get("additionalProperties") is not False:
            any_key = f"{writer.as_written(self.key_begin)} /[\\w.\\-]{{1,64}}/ {self._key_end(writer, None)}"
            value = writer.free_until(f"value_{index}", self.value_end)
            parts.append(f"( {writer.add(f'parameter_{index}', f'{any_key} {value}')} )*")
        elif not properties and self.typed:
            parts.append('"\\n"?')  # as DeepSeek's template has it
        parts.append(writer.as_written(self.end))
        return " ".join(part for part in parts if part)

    def _key_end(self, writer: RuleWriter, is_text: bool | None) -> str:
        """Returns the rule of the text between a key and its value, which may be text, JSON, or either (None)."""
        if not self.typed:
            return writer.as_written(self.key_end)
        word = "true" if is_text is not False else "false"
        return writer.as_written(f"{self.typed}{word}{self.key_end}")

    def _parameter(self, writer: RuleWriter, name: str, key: str, schema: Any, document: Mapping[str, Any]) -> str:
        """Returns the grammar rule of one parameter of a call.

        Args:
            writer: the grammar's rules.
            name: the name of the rule of the parameter's value.
            key: the parameter's name.
            schema: the schema of the value.
            document: the schema that references point into.
        """
        types = parameter_types(schema, document)
        before = writer.as_written(self.key_begin + key)
        end = writer.as_written(self.value_end)
        values = listed_values(schema, document)
        if values is not None:
            each = []
            for value in values:
                is_text = isinstance(value, str)
                text = value if is_text else json.dumps(value, ensure_ascii=False)
                each.append(f"{self._key_end(writer, is_text)} {quoted(text) if text else ''}")
            if not each:
                raise unmet(f"the parameter {shown(key)}")
            return f"{before} ( {' | '.join(each)} ) {end}"
        if types == {"boolean"}:
            choices = " | ".join(quoted(word) for word in ("true", "false", "True", "False"))
            return f"{before} {self._key_end(writer, False)} ( {choices} ) {end}"
        if types and "string" not in types:
            definitions = {k: v for k, v in document.items() if k == "$defs"}
            return f"{before} {self._key_end(writer, False)} %json {json_rule({**definitions, **schema})} {end}"
        if schema is False:
            raise unmet(f"the parameter {shown(key)}")
        return f"{before} {self._key_end(writer, True)} {writer.free_until(name, self.value_end, text_pattern(schema))}"

    # ---- parser

    def read(self, reader: AnswerReader, calls: Calls, opener: str, *, named: bool = False) -> Steps:
        """Reads one call. The arguments are those of `Notation.read`."""
        alone = yield from self._read_name(reader, calls, opener, named=named)
        if alone is None:
            return None
        return True if alone else (yield from self._read_parameters(reader, calls))

    def _read_name(self, reader: AnswerReader, calls: Calls, opener: str, *, named: bool) -> Steps:
        """Reads the text before a call's parameters, and begins the call.

        Returns True if the tag closes itself (a call without parameters), False if parameters follow, and None if the
        text isn't a call. The parameters are those of ``read``.
        """
        if self.name_begin:
            begin = self.name_begin.split()
            rest = " ".join(begin[1:]) if named else self.name_begin
            if rest and not (yield from reader.take_words(rest)):
                if not reader.broke_off(calls.section_end or rest):
                    reader.reject_call(opener, expected=rest)
                return None
        name_end = self.name_end.strip() or "\n"
        alone = name_end[:-1] + "/>" if name_end.endswith(">") else ""  # a call without parameters
        followers = [] if self.name_begin else [self.key_begin, calls.end.strip()]
        match = yield from reader.read_word(Stops([name_end, alone, *followers]))
        name, stop = ("", "") if match is None else (match[0].strip(), match[1])
        if not name:
            if match is None and reader.ended:
                reader.at = len(reader.text)
            reader.reject_call(opener)
            return None
        if stop in followers:
            reader.at -= len(stop)
        reader.begin_call(name)
        if stop != alone:
            return False
        reader.add_arguments("{}")
        return True

    def _read_parameters(self, reader: AnswerReader, calls: Calls) -> Steps:
        """Reads the parameters and the end of a call, and adds the arguments. Returns False if they are cut off."""
        number = 0
        reader.add_arguments("{")
        while True:
            yield from reader.skip_space()
            if (yield from reader.take_words(self.key_begin)):
                if not (yield from self._read_parameter(reader, calls, number)):
                    return False
                number += 1
                continue
            if self.end:
                ended = yield from reader.take_words(self.end)
            else:
                ended = (yield from reader.peek((calls.end.strip(),))) is not None
            if ended:
                reader.add_arguments("}")
            return ended

    def _read_parameter(self, reader: AnswerReader, calls: Calls, number: int) -> Steps:
        """Reads one parameter of the last call, and adds its key and value as JSON.

        Returns False if the parameter is cut off or malformed. ``number`` is the number of parameters before it.
        """
        match = yield from self._read_key(reader)
        if match is None:
            return False
        key, is_text, framed = match
        document = (reader.schemas or {}).get(reader.names[-1])
        properties = document.get("properties") if isinstance(document, Mapping) else None
        types = parameter_types(properties.get(key) if isinstance(properties, Mapping) else None, document)
        if is_text is None:
            is_text = types == {"string"}
        reader.add_arguments((", " if number else "") + json.dumps(key, ensure_ascii=False) + ": ")
        parts: list[str] = []
        if is_text:
            reader.add_arguments('"')
        emit: Callable[[str], None] = reader.add_quoted if is_text else parts.append
        if not (yield from self._read_value(reader, calls, emit, framed=framed)):
            return False
        reader.add_arguments('"' if is_text else typed_json("".join(map(reader.spell, parts)), types))
        return True

    def _read_key(self, reader: AnswerReader) -> Steps:
        """Reads a parameter's key. Returns (key, form, framed); None if they can't be read.

        ``form`` is True if the model marks the value as text, False if it marks it as JSON, None if it doesn't mark it.
        ``framed`` is True if a line break precedes the value; then one also follows it.
        """
        is_text: bool | None = None
        ends = words(self.key_end)
        match = yield from reader.read_word(Stops([self.typed or ends[0], ends[0]]))
        if match is None:
            return None
        key = match[0]
        if self.typed and match[1] == self.typed:
            match = yield from reader.read_word(Stops([ends[0]]))
            if match is None:
                return None
            is_text = match[0] == "true"
        for part in ends[1:]:
            if not (yield from reader.take_words(part)):
                return None
        framed = self.key_end.endswith("\n") and (yield from reader.take("\n")) is not None
        return key, is_text, framed

    def _read_value(self, reader: AnswerReader, calls: Calls, emit: Callable[[str], None], *, framed: bool) -> Steps:
        """Emits a parameter's value, and consumes its end. Returns False if the value is cut off.

        An end counts only if a parameter or the call's end follows, because a value may contain the text of an end.

        Args:
            emit: called with each piece of the value.
            framed: True if a line break precedes and follows the value.
        """
        value_end = self.value_end.strip()
        if framed and (yield from reader.take(value_end)) is not None:
            return True
        frame = "\n" if framed else ""
        followers = tuple(one for one in (self.key_begin, self.end or calls.end.strip()) if one)
        others = [frame + one for one in followers] if self.value_end.startswith("\n") else []
        last = "" if others else calls.end.strip()  # of a value that isn't closed, if nothing else follows
        stops = Stops([frame + value_end, *others, last])
        while True:
            stop = yield from reader.read_until(stops, emit, whole=True)
            if stop is None:
                return False
            if stop in others:
                reader.at -= len(stop) - len(frame)
                return True
            if (yield from _follows(reader, calls.openers if stop == last else followers)):
                reader.at -= len(stop) if stop == last else 0
                return True
            emit(stop)


def _follows(reader: AnswerReader, expected: Sequence[str]) -> Steps:
    """Returns True if one of ``expected`` follows, after space, or if the answer ends within one. Consumes nothing."""
    here, before = reader.at, reader.hold()
    yield from reader.skip_space()
    follows = (yield from reader.peek(expected)) is not None
    if not follows and reader.ended:
        rest = reader.rest
        follows = any(one.startswith(rest) for one in (*expected, ""))
    reader.at = here
    reader.release(before)
    return follows
