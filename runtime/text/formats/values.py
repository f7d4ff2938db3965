"""Rules of the values that a JSON schema allows, in notations other than JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...shared.errors import RequestError
from ...shared.json_schema_keywords import KEYWORDS
from .json_types import MOST_DEPTH, merged_object, parameter_types, resolve
from .rules import RuleWriter, quoted, unmet

_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/"
_INTEGER = "/-?(0|[1-9][0-9]*)/"
_ENFORCED = frozenset(("type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf")) | frozenset(
    ("$ref", "$defs", "definitions", "additionalProperties", "nullable")
)
"""Keywords that are enforced in notations other than JSON."""


@dataclass(frozen=True)
class ValueStyle:
    """The spelling of values, as grammar rules.

    Attributes:
        true, false, null: these three values.
        separator: text between two items or members.
        colon: text between a key and its value.
        text: rule of any text.
        any_key: rule of any key of an object.
        literal: returns the rule of one text.
        key: returns the rule of one key.
        sorted_keys: True if members are sorted by their keys in lower case.
    """

    true: str
    false: str
    null: str
    separator: str
    colon: str
    text: str
    any_key: str
    literal: Callable[[str], str]
    key: Callable[[str], str]
    sorted_keys: bool = False


class ValueRules:
    """Writes the grammar rules of one tool's arguments.

    Args:
        writer: the grammar's rules, to which rules are added.
        index: the tool's number, for the names of rules.
        tool: the tool's name, for messages.
        style: how calls spell true, false and null, texts, keys and separators.
    """

    def __init__(self, writer: RuleWriter, index: int, tool: str, style: ValueStyle) -> None:
        self._writer, self._index, self._tool, self._style = writer, index, tool, style
        self._references: dict[str, str] = {}
        self._count = 0
        self._document: Mapping[str, Any] = {}

    def keyword_arguments(self, schema: Mapping[str, Any]) -> str:
        """Returns the grammar rule of a call's arguments as keyword arguments of Python.

        ``schema``: the schema of the arguments.
        """
        self._document = schema
        any_keyword = '/[A-Za-z_]\\w{0,63}/ "="'
        return self._members(merged_object(schema, schema), lambda key: quoted(key + "="), any_keyword, 0)

    def value(self, schema: Mapping[str, Any]) -> str:
        """Returns the grammar rule of a call's arguments as one value. ``schema``: the schema of the arguments."""
        self._document = schema
        return self._value(merged_object(schema, schema), 0)

    def _new_name(self) -> str:
        self._count += 1
        return f"value_{self._index}_{self._count}"

    def _refuse(self, keyword: str) -> RequestError:
        return RequestError(
            f"tools: {self._tool}: {keyword} can't be held in this model's calls", hint="Leave it out, or strict."
        )

    def _value(self, schema: Any, depth: int) -> str:
        """Returns the rule of a value.

        Args:
            schema: of the value.
            depth: the levels of schemas around it.
        """
        if schema is True or schema == {}:
            return self._any()
        if schema is False:
            return self._one_of([])
        if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
            raise self._refuse("such a schema")
        if "allOf" in schema or ("properties" in schema and schema.keys() & {"anyOf", "oneOf"}):
            schema = merged_object(schema, self._document)
        self._note_ignored(schema)
        if isinstance(schema.get("$ref"), str):
            return self._reference(schema["$ref"], depth)
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self._one_of([self._literal(value) for value in values])
        alternatives = schema.get("anyOf", schema.get("oneOf"))
        if alternatives is not None:
            return self._one_of([self._value(one, depth + 1) for one in alternatives if one is not False])
        choices = [self._typed(kind, schema, depth) for kind in sorted(parameter_types(schema, self._document))]
        if not choices:
            return self._any()
        return choices[0] if len(choices) == 1 else self._one_of(choices)

    def _one_of(self, choices: Sequence[str]) -> str:
        """Returns the rule of any of several rules. Raises RequestError without any, as no value has such a schema."""
        if not choices:
            raise unmet(f"a value of {self._tool}")
        return f"( {' | '.join(choices)} )"

    def _note_ignored(self, schema: Mapping[str, Any]) -> None:
        """Notes the keywords that can't be enforced. Raises RequestError for these if the grammar has to be exact."""
        ignored = sorted(schema.keys() & KEYWORDS - _ENFORCED - {"format"})
        if ignored and self._writer.exact:
            raise self._refuse(ignored[0])
        self._writer.ignored |= {f"tools.{keyword}" for keyword in ignored}

    def _reference(self, reference: str, depth: int) -> str:
        """Adds the rule of the schema that a ``$ref`` names, once, and returns the rule's name."""
        if reference not in self._references:
            name = self._references[reference] = self._new_name()
            self._writer.rules[name] = self._value(resolve(reference, self._document), depth + 1)
        return self._references[reference]

    def _typed(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        """Returns the rule of a value with ``schema``, if it is of the JSON type ``kind``.

        ``depth``: the levels around it.
        """
        style = self._style
        if kind == "string":
            return style.text
        if kind in ("integer", "number"):
            return _INTEGER if kind == "integer" else _NUMBER
        if kind == "boolean":
            return f"( {style.true} | {style.false} )"
        if kind == "null":
            return style.null
        if kind == "array":
            item = self._value(schema.get("items", {}), depth + 1)
            return f'"[" ( {item} ( {style.separator} {item} )* )? "]"'
        any_key = f"{style.any_key} {style.colon}"
        return f'"{{" {self._members(schema, lambda key: f"{style.key(key)} {style.colon}", any_key, depth)} "}}"'

    def _members(self, schema: Mapping[str, Any], begin: Callable[[str], str], any_key: str, depth: int) -> str:
        """Returns the rule of an object's members in the schema's order: all required ones, and any of the others.

        Args:
            schema: the schema of the object.
            begin: returns the rule of a key, up to its value.
            any_key: the rule of any key, up to its value.
            depth: the levels of schemas around the object.
        """
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        separator = self._style.separator
        if not properties:
            if schema.get("additionalProperties") is False:
                return ""
            one = f"{any_key} {self._any()}"
            return f"( {one} ( {separator} {one} )* )?"
        if self._style.sorted_keys:
            properties = dict(sorted(properties.items(), key=lambda one: one[0].lower()))
        members = []
        for key, one in properties.items():
            if one is not False or key in required:
                rule = f"{begin(key)} {self._value(one, depth + 1)}"
                members.append((self._writer.add(self._new_name(), rule), key in required))
        # rest: the rule of the members after this one; first: that of this one and those after it, if none precedes.
        rest, first = "", ""
        for name, needed in reversed(members):
            follow = self._writer.add(self._new_name(), f"{separator} {name} {rest}")
            alone = f"{name} {rest}".strip()
            either = f"{alone} | {first}" if first else f'{alone} | ""'
            first = self._writer.add(self._new_name(), alone if needed else either)
            rest = follow if needed else self._writer.add(self._new_name(), f"{follow} | {rest or chr(34) * 2}")
        return first

    def _any(self) -> str:
        """Adds the rule of any value, once, and returns its name."""
        name = f"any_{self._index}"
        if name not in self._writer.rules:
            style = self._style
            self._writer.rules[name] = (
                f"{style.text} | {_NUMBER} | {style.true} | {style.false} | {style.null} "
                f'| "[" ( {name} ( {style.separator} {name} )* )? "]"'
            )
        return name

    def _literal(self, value: Any) -> str:
        """Returns the rule of one value of JSON."""
        style = self._style
        if isinstance(value, str):
            return style.literal(value)
        if value is None or isinstance(value, bool):
            return style.null if value is None else style.true if value else style.false
        if isinstance(value, (int, float)):
            return quoted(json.dumps(value))
        if isinstance(value, list):
            return f'"[" {f" {style.separator} ".join(map(self._literal, value))} "]"'
        raise self._refuse("an object in enum or const")
