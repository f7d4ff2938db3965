"""Keywords of JSON Schema: those that can limit an answer, those that can't, and their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ENFORCED_FORMATS = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
"""The values of ``format`` that llguidance enforces."""
STANDARD_FORMATS = ENFORCED_FORMATS | frozenset(
    (
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"),
        *("relative-json-pointer", "regex"),
    )
)
_TYPES = frozenset(("object", "array", "string", "integer", "number", "boolean", "null"))


def is_text(value: Any) -> bool:
    """Returns True for a string."""
    return isinstance(value, str)


def is_schema(value: Any) -> bool:
    """Returns True if a value can be a schema: an object, true or false."""
    return isinstance(value, (dict, bool))


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_schema, value))


def _is_schema_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_schema, value.values()))


def is_number(value: Any) -> bool:
    """Returns True for a number. True and False aren't numbers, although Python counts them among the integers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """Returns True for an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_type(value: Any) -> bool:
    """Returns True for a valid value of ``type``: the name of a type, or a list of names."""
    return all(isinstance(one, str) and one in _TYPES for one in (value if isinstance(value, list) else [value]))


def is_names(value: Any) -> bool:
    """Returns True for a list of strings."""
    return isinstance(value, list) and all(map(is_text, value))


COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
"""Keywords whose value is a count."""
ENFORCED: dict[str, Callable[[Any], bool]] = {
    "type": is_type,
    "enum": lambda value: isinstance(value, list),
    "const": lambda value: True,
    **dict.fromkeys(("properties", "patternProperties"), _is_schema_map),
    **dict.fromkeys(("additionalProperties", "additionalItems", "unevaluatedProperties"), is_schema),
    "required": is_names,
    **dict.fromkeys(COUNTS, is_count),
    "items": lambda value: is_schema(value) or _is_schemas(value),
    **dict.fromkeys(("prefixItems", "allOf", "anyOf", "oneOf"), _is_schemas),
    **dict.fromkeys(("pattern", "format", "$ref"), is_text),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), is_number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), lambda value: isinstance(value, (int, float))),
}
"""Keyword that an answer can be forced to meet -> the function that returns True for a valid value of it."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "then": (True, {}),
    "else": (True, {}),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "uniqueItems": (False,),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedItems": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
"""Keyword that can't be enforced -> its values that have no effect."""
KEYWORDS = frozenset(ENFORCED)
"""The keywords that can be enforced in answers that are JSON."""
