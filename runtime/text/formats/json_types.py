"""JSON schemas of tools, as notations other than JSON need them: types of parameters, merged objects, typed values."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from ...shared.json_schema_references import at_pointer
from .markers import MARKERS

LONGEST_LITERAL = 100_000
"""The most characters of a Python literal that is evaluated."""
MOST_DEPTH = 16
"""The most levels of nested schemas that are followed."""


def tool_schemas(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    """Returns the schema of the arguments of each tool, by the tool's name; None without tools."""
    if tools is None:
        return None
    schemas = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schemas[function["name"]] = function.get("parameters", function.get("input_schema"))
    return schemas


def parameter_types(schema: Any, document: Any, depth: int = 0) -> set[str]:
    """Returns the JSON types that a schema allows, as far as the schema names them; empty if it names none.

    Args:
        schema: the schema of a parameter, or any other value.
        document: the schema that references point into.
        depth: references and alternatives followed so far.
    """
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        return parameter_types(resolve(reference, document), document, depth + 1)
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named) if isinstance(named, (list, tuple)) else set()
    if not types:
        for choice in ("anyOf", "oneOf", "allOf"):
            for one in schema.get(choice) or ():
                types |= parameter_types(one, document, depth + 1)
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        types |= {_type_of(value) for value in values}
    if schema.get("nullable") is True:
        types.add("null")
    return types


def resolve(reference: str, document: Any) -> Any:
    """Returns the part of a document that a reference such as "#/$defs/a" names; None if the document lacks it."""
    return at_pointer(document, unquote(reference[1:])) if reference.startswith("#/") else None


def listed_values(schema: Any, document: Any) -> list[Any] | None:
    """Returns the values that a schema lists by ``const`` or ``enum``; None without either keyword.

    ``document`` is the schema that references point into.
    """
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        schema = resolve(schema["$ref"], document)
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return list(values) if isinstance(values, (list, tuple)) else None


def merged_object(schema: Mapping[str, Any], document: Any, depth: int = 0) -> dict[str, Any]:
    """Returns one object with the properties of ``allOf``, ``anyOf``, ``oneOf`` and ``$ref``.

    Notations other than JSON can't express alternatives of objects. A property that several alternatives define may
    have the schema of any of them; only what all alternatives require is required.

    Args:
        schema: the schema of an object.
        document: the schema that references point into.
        depth: references and parts followed so far.
    """
    if isinstance(schema.get("$ref"), str) and depth <= MOST_DEPTH:
        target = resolve(schema["$ref"], document)
        return merged_object(target, document, depth + 1) if isinstance(target, Mapping) else dict(schema)
    groups = [schema[keyword] for keyword in ("anyOf", "oneOf") if keyword in schema]
    parts = schema.get("allOf", ())
    if depth > MOST_DEPTH or not (groups or parts):
        return dict(schema)
    result = {k: v for k, v in schema.items() if k not in ("allOf", "anyOf", "oneOf")}
    for part in parts:
        if isinstance(part, Mapping):
            merged = merged_object(part, document, depth + 1)
            result = {**merged, **result, **_joined_properties([result, merged], "allOf", result, merged)}
    for group in groups:
        each = [merged_object(one, document, depth + 1) for one in group if isinstance(one, Mapping)]
        objects = [one for one in each if "object" in parameter_types(one, document) or "properties" in one]
        if objects:
            result |= _with_alternatives(result, objects)
        else:
            result.setdefault("anyOf", group)
    return result


def _with_alternatives(schema: Mapping[str, Any], objects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the changed keywords of an object after it is merged with its alternatives.

    The object may have the properties of every alternative. It requires only those that it, or all alternatives,
    require.
    """
    common = set.intersection(*(set(one.get("required", ())) for one in objects))
    result = _joined_properties([schema, *objects], "anyOf", schema, {"required": [*common]})
    result["type"] = schema.get("type", "object")
    if all(one.get("additionalProperties") is False for one in objects):
        result["additionalProperties"] = False
    return result


def _joined_properties(schemas: Sequence[Mapping[str, Any]], how: str, *requiring: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``properties`` and ``required`` of several objects together.

    Args:
        schemas: the objects.
        how: the keyword that joins several schemas of one property, "allOf" or "anyOf".
        requiring: the objects whose ``required`` counts.
    """
    properties: dict[str, list[Any]] = {}
    for schema in schemas:
        for name, one in schema.get("properties", {}).items():
            known = properties.setdefault(name, [])
            if one is not True and one != {} and one not in known:
                known.append(one)
    result: dict[str, Any] = {}
    if properties:
        result["properties"] = {
            name: True if not each else each[0] if len(each) == 1 else {how: each} for name, each in properties.items()
        }
    required = dict.fromkeys(name for schema in requiring for name in schema.get("required", ()))
    return result | ({"required": [*required]} if required else {})


def text_pattern(schema: Any) -> str:
    """Returns the regular expression of a text parameter by its ``pattern``, ``minLength`` and ``maxLength``."""
    if not isinstance(schema, Mapping):
        return "(?s:.*)"
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        inner = pattern.removeprefix("^")
        inner = inner.removesuffix("$") if not end else inner
        slashes = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", inner)
        return f"{begin}(?:{slashes}){end}"
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if isinstance(least, int) and (least or isinstance(most, int)):
        return f"(?s:.{{{least},{most if isinstance(most, int) else ''}}})"
    return "(?s:.*)"


# ---- values


def typed_json(text: str, types: set[str]) -> str:
    """Returns the text of a parameter as JSON of one of the ``types``; as a JSON string if it fits none of them.

    Without types, a text that is JSON stays unchanged.
    """
    word = text.strip()
    if word in ("null", "None") and (not types or "null" in types):
        return "null"
    if word.lower() in ("true", "false") and (not types or "boolean" in types):
        return word.lower()
    if types - {"string"} or not types:
        value = json_value(word)
        if value is not None and (not types or _fits(value, types)):
            return word
        if types & {"object", "array"} and (literal := python_as_json(word)) is not None:
            return literal
    return json.dumps(text, ensure_ascii=False)


def json_value(text: str) -> Any:
    """Returns the value of a JSON text; None if it isn't JSON, or is null."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):  # deep nesting
        return None


def python_as_json(text: str) -> str | None:
    """Returns a Python literal as JSON; None if the text isn't one, or is too long."""
    word = text.strip()
    if word in ("true", "false", "null"):
        return word
    if len(word) > LONGEST_LITERAL:
        return None
    try:
        document = json.dumps(ast.literal_eval(word), ensure_ascii=False, allow_nan=False)
        if MARKERS.search(document):  # lone surrogates, which aren't text
            document = json.dumps(json.loads(document))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return document


def _type_of(value: Any) -> str:
    """Returns the JSON type of a value."""
    if value is None:
        return "null"
    names = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array"}
    return names.get(type(value), "object")


def _fits(value: Any, types: set[str]) -> bool:
    """Returns True if a decoded value that isn't a string has one of these JSON types."""
    kind = _type_of(value)
    if kind == "string":
        return False  # the quotes are part of the text
    whole = kind == "number" and value.is_integer() and "integer" in types
    return kind in types or whole or (kind == "integer" and "number" in types)
