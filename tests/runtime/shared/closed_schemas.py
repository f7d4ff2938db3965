"""Forty schemas without ``additionalProperties``, as clients write them, and a check of answers that is our own."""

from __future__ import annotations

from typing import Any, Literal

import jsonschema
import pydantic

TEXT = {"type": "string", "maxLength": 3}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
FREE = {"type": "object", "maxProperties": 1, "additionalProperties": DIGIT}


def thing(**properties: Any) -> dict[str, Any]:
    """Returns an object all of whose properties are required."""
    return {"type": "object", "properties": properties, "required": [*properties]}


class Address(pydantic.BaseModel):
    street: str = pydantic.Field(max_length=3)
    zip_code: int | None = pydantic.Field(default=None, ge=0, le=9)


class Person(pydantic.BaseModel):
    """A person, with what pydantic writes of nested models, options, lists and defaults."""

    name: str = pydantic.Field(max_length=3)
    home: Address
    others: list[Address] = pydantic.Field(default=[], max_length=1)
    kind: Literal["a", "b"] = "a"


class Cat(pydantic.BaseModel):
    pet: Literal["cat"]
    lives: int = pydantic.Field(ge=0, le=9)


class Dog(pydantic.BaseModel):
    pet: Literal["dog"]
    tricks: list[Literal["sit", "roll"]] = pydantic.Field(max_length=2)


class Owner(pydantic.BaseModel):
    pet: Cat | Dog = pydantic.Field(discriminator="pet")


class Tree(pydantic.BaseModel):
    value: int = pydantic.Field(ge=0, le=9)
    children: list[Tree] = pydantic.Field(default=[], max_length=1)


def _optional(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


_ROW = {"type": "array", "items": thing(a=DIGIT), "maxItems": 2}
_PARTS = {"A": thing(a=DIGIT), "B": thing(b=DIGIT), "Word": TEXT}
_A, _B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
_NEXT = {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}
_NODE = {"Node": thing(value=DIGIT, next=_NEXT)}
_EXTRA = {"allOf": [{"$ref": "#/$defs/T"}], "properties": {"extra": DIGIT}, "required": ["extra"]}
_OLD_NODE = {"allOf": [{"$ref": "#/definitions/N"}], "title": "N", "description": "the next one"}

CLOSED: dict[str, dict[str, Any]] = {
    "plain": thing(name=TEXT, age=DIGIT),
    "optional": _optional(a=DIGIT, b=TEXT),
    "no type": {"properties": {"a": DIGIT}, "required": ["a"]},
    "nullable object": {"type": ["object", "null"], "properties": {"a": DIGIT}},
    "no properties at all": {"type": "object", "properties": {}},
    "nested": thing(outer=thing(inner=thing(a=DIGIT))),
    "array of objects": {"type": "array", "items": thing(a=DIGIT), "maxItems": 2},
    "nested arrays": {"type": "array", "items": _ROW, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [thing(a=DIGIT), thing(b=DIGIT)], "items": False, "minItems": 2},
    "allOf": {"allOf": [thing(a=DIGIT), thing(b=DIGIT)]},
    "allOf and properties": {**thing(c=DIGIT), "allOf": [thing(a=DIGIT), thing(b=DIGIT)]},
    "allOf of references": {"$defs": _PARTS, "allOf": [_A, _B]},
    "allOf in allOf": {"$defs": _PARTS, "allOf": [{"allOf": [_A, {"properties": {"c": DIGIT}}]}, _B]},
    "a property of allOf": {"$defs": _PARTS, **thing(p={"allOf": [_A, _B]})},
    "one property in two parts": {"allOf": [thing(a={"type": "integer"}), {"properties": {"a": DIGIT}}]},
    "reference": {"$defs": _PARTS, **thing(p=_A, q={"type": "array", "items": _B, "maxItems": 1})},
    "reference at the root": {"$defs": _PARTS, "$ref": "#/$defs/A"},
    "reference and properties": {"$defs": _PARTS, **_A, "properties": {"c": DIGIT}, "required": ["c"]},
    "reference to a component": {"components": {"schemas": {"A": thing(a=DIGIT)}}, "$ref": "#/components/schemas/A"},
    "recursive": {"$defs": _NODE, "$ref": "#/$defs/Node"},
    "recursive at the root": thing(a=DIGIT) | {"properties": {"a": DIGIT, "more": {"$ref": "#"}}},
    "recursive by definitions": {**thing(n=_OLD_NODE), "definitions": {"N": _optional(v=DIGIT, n=_OLD_NODE)}},
    "recursive with more": {"$defs": {"T": _optional(v=DIGIT, sub=_EXTRA)}, **thing(t=_EXTRA)},
    "anyOf": {"$defs": _PARTS, "anyOf": [_A, _B]},
    "anyOf and properties": {**thing(a=DIGIT), "anyOf": [thing(b=DIGIT), thing(c=TEXT)]},
    "anyOf of references and properties": {"$defs": _PARTS, **thing(k=TEXT), "anyOf": [_A, _B]},
    "anyOf of required": {**_optional(a=DIGIT, b=DIGIT), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "two anyOf": {"allOf": [{"anyOf": [thing(a=DIGIT), thing(b=DIGIT)]}, {"anyOf": [thing(c=DIGIT), thing(d=DIGIT)]}]},
    "oneOf by a tag": {"oneOf": [thing(t={"const": "x"}, a=DIGIT), thing(t={"const": "y"}, b=DIGIT)]},
    "oneOf by what is required": {"$defs": _PARTS, **thing(p={"oneOf": [_A, _B, {"type": "null"}]})},
    "patternProperties": {"type": "object", "patternProperties": {"^x[0-9]$": DIGIT}},
    "patternProperties and properties": {**thing(a=DIGIT), "patternProperties": {"^x[0-9]$": DIGIT}},
    "two patternProperties": {"type": "object", "patternProperties": {"^S_[a-c]$": TEXT, "^I_[a-c]$": DIGIT}},
    "patternProperties in allOf": {"allOf": [{"patternProperties": {"^x[0-9]$": DIGIT}}, thing(a=DIGIT)]},
    "unevaluatedProperties": {"allOf": [thing(a=DIGIT)], "properties": {"b": DIGIT}, "unevaluatedProperties": False},
    "Ollama's example": thing(name=TEXT, capital=TEXT, languages={"type": "array", "items": TEXT, "maxItems": 2}),
    "pydantic": Person.model_json_schema(),
    "pydantic with a discriminator": Owner.model_json_schema(),
    "pydantic, recursive": Tree.model_json_schema(),
    "annotations": {
        "$schema": "https://example.org/no-draft",
        "$id": "https://example.org/a",
        "$comment": "a",
        **thing(a={**DIGIT, "title": "A", "deprecated": True, "readOnly": True, "x-order": 1, "format": "int64"}),
        "examples": [{"a": 1}],
        "default": None,
    },
}
"""Schemas whose objects are all closed."""

OPEN: dict[str, dict[str, Any]] = {
    "free": FREE,
    "a free property": thing(meta={"type": "object"}),
    "additionalProperties": {**thing(a=DIGIT), "additionalProperties": True},
    "a schema of the others": {**thing(a=DIGIT), "additionalProperties": TEXT},
    "in a part": {"allOf": [thing(a=DIGIT), {"additionalProperties": DIGIT}]},
    "unevaluatedProperties": {**thing(a=DIGIT), "unevaluatedProperties": TEXT},
    "an alternative": {"anyOf": [{"type": "object", "additionalProperties": DIGIT}, {"type": "null"}]},
}
"""Schemas with objects that stay open."""

ENDLESS: dict[str, dict[str, Any]] = {
    "itself": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "a list that needs itself": {"$defs": {"n": thing(v=DIGIT, n={"$ref": "#/$defs/n"})}, "$ref": "#/$defs/n"},
    "the root": thing(a={"$ref": "#"}),
    "an array": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "each other": {
        "$defs": {"a": thing(b={"$ref": "#/$defs/b"}), "b": thing(a={"$ref": "#/$defs/a"})},
        "$ref": "#/$defs/a",
    },
    "in all alternatives": {"anyOf": [thing(a={"$ref": "#"}), thing(b={"$ref": "#"})]},
}
"""Schemas that no instance meets which ends."""

DEAD: dict[str, dict[str, Any]] = {
    "enum": {"enum": []},
    "a property": thing(a={"enum": []}),
    "lengths": thing(a={"type": "string", "minLength": 3, "maxLength": 2}),
    "false": thing(a=False),
    "pattern and length": thing(a={"type": "string", "pattern": "^abcd$", "maxLength": 2}),
    "two patterns": thing(a={"allOf": [{"type": "string", "pattern": "^a$"}, {"pattern": "^b$"}]}),
    "bounds": thing(a={"type": "integer", "minimum": 3, "maximum": 2}),
    "a multiple": thing(a={"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 5}),
    "items": thing(a={"type": "array", "items": {"enum": []}, "minItems": 1}),
    "types": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "no alternative": {"anyOf": [thing(a=False), {"enum": []}]},
    "const": thing(a={"const": "x", "type": "integer"}),
}
"""Schemas that no instance meets."""


def _target(schema: Any, root: Any) -> Any:
    for part in schema["$ref"].removeprefix("#").split("/")[1:]:
        root = root[part]
    return root


def _is_closed(schema: Any, root: Any, depth: int = 0) -> bool:
    """Returns True if a schema, or what it is merged of, declares properties."""
    if not isinstance(schema, dict) or depth > 5:
        return False
    if schema.keys() & {"properties", "patternProperties"}:
        return True
    inner = [one for name in ("allOf", "anyOf", "oneOf") for one in schema.get(name, ())]
    inner += [_target(schema, root)] if "$ref" in schema else []
    return any(_is_closed(one, root, depth + 1) for one in inner)


def _site(schema: Any, root: Any) -> Any:
    """Returns a schema where a value begins: it is closed there, with all that it is merged of."""
    if not isinstance(schema, dict):
        return schema
    closed = _inside(schema, root)
    if _is_closed(schema, root) and "unevaluatedProperties" not in schema:
        closed["unevaluatedProperties"] = False
    return closed


def _inside(schema: Any, root: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name, value in schema.items():
        if name in ("properties", "patternProperties"):
            result[name] = {key: _site(one, root) for key, one in value.items()}
        elif name in ("items", "additionalProperties"):
            result[name] = _site(value, root)
        elif name == "prefixItems":
            result[name] = [_site(one, root) for one in value]
        elif name in ("allOf", "anyOf", "oneOf"):
            result[name] = [_inside(one, root) for one in value]
        elif name in ("$defs", "definitions"):
            result[name] = {key: _inside(one, root) for key, one in value.items()}
        elif name == "components":
            result[name] = {"schemas": {key: _inside(one, root) for key, one in value["schemas"].items()}}
    result.pop("$schema", None)
    return result


def validator(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """Returns a validator of a schema in which only declared properties are allowed.

    It says so by ``unevaluatedProperties``, which no code of the package writes.
    """
    return jsonschema.Draft202012Validator(_site(schema, schema))
