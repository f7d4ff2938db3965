"""Facts about the instances of a JSON schema: their types and values, and if one can be finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .json_schema_keywords import is_number, is_text, is_type

_PASSES = 64
_COMPARED = 64  # values of two alternatives that are compared with one another


def list_of(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """Returns the value of a keyword if it is a list; an empty list otherwise."""
    return as_list(schema.get(keyword))


def as_list(value: Any) -> list[Any]:
    """Returns a value if it is a list; an empty list otherwise."""
    return value if isinstance(value, list) else []


def map_of(schema: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    """Returns the value of a keyword if it is an object; an empty object otherwise."""
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def groups_of(part: Mapping[str, Any]) -> list[list[Any]]:
    """Returns the values of the schema's own ``anyOf`` and ``oneOf``, without those of nested schemas."""
    return [part[keyword] for keyword in ("anyOf", "oneOf") if isinstance(part.get(keyword), list)]


# Alternatives


def types_of(schema: Any) -> set[str] | None:
    """Returns the types that a schema allows; None if it doesn't restrict them."""
    if not isinstance(schema, dict):
        return None
    if (values := values_of(schema)) is not None:
        return {_type_name(value) for value in values}
    types = schema.get("type")
    if types is None or not is_type(types):
        return None
    return {"number" if one == "integer" else one for one in (types if isinstance(types, list) else [types])}


def _type_name(value: Any) -> str:
    names: dict[type, str] = {bool: "boolean", str: "string", int: "number", float: "number", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def are_disjoint(a: Any, b: Any) -> bool:
    """Returns True if two schemas certainly have no instance in common; False may also mean that it isn't known."""
    if a is False or b is False or _differ(a, b):
        return True
    if types_of(a) != {"object"} or not isinstance(b, dict) or (values_of(a) is not None and values_of(b) is not None):
        return False
    required = set(filter(is_text, list_of(b, "required")))
    inner_a, inner_b = map_of(a, "properties"), map_of(b, "properties")
    closed = a.get("additionalProperties") is False and not a.get("patternProperties")
    if closed and required - inner_a.keys():
        return True
    both = required.intersection(filter(is_text, list_of(a, "required")))
    return any(_differ(inner_a.get(name), inner_b.get(name)) for name in both)


def _differ(a: Any, b: Any) -> bool:
    """Returns True if two schemas allow no common type, or if both list their values and have none in common."""
    types_a, types_b = types_of(a), types_of(b)
    if types_a is not None and types_b is not None and not types_a & types_b:
        return True
    values_a, values_b = values_of(a), values_of(b)
    return values_a is not None and values_b is not None and _have_none_in_common(values_a, values_b)


def _have_none_in_common(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) * len(b) <= _COMPARED**2 and not any(value in b for value in a)


def values_of(schema: Any) -> list[Any] | None:
    """Returns the values that ``const`` or ``enum`` of a schema allows; None if it has neither."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


# Instances without end


def endless_definitions(definitions: Mapping[str, Any]) -> set[str]:
    """Returns the names of definitions that only infinite instances meet, because they require themselves."""
    order: list[str] = []
    seen: set[str] = set()
    inner = {name: list(_referenced(one)) for name, one in definitions.items()}
    for start in definitions:
        stack = [(start, iter(inner[start]))] if start not in seen else []
        seen.add(start)
        while stack:
            name, rest = stack[-1]
            following = next((one for one in rest if one in inner and one not in seen), None)
            if following is None:
                order.append(name)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(inner[following])))
    finite: set[str] = set()
    for _ in range(_PASSES):
        count = len(finite)
        for name in order:
            if name not in finite and _is_finite(definitions[name], finite):
                finite.add(name)
        if len(finite) == count:
            return definitions.keys() - finite
    return set()


def is_endless(schema: Any, definitions: Mapping[str, Any]) -> bool:
    """Returns True if only infinite instances meet a schema. All ``definitions`` must have finite instances."""
    return not _is_finite({k: v for k, v in schema.items() if k != "$defs"}, set(definitions))


def _is_finite(schema: Any, finite: set[str]) -> bool:
    """Returns True if a schema has a finite instance. ``finite``: the definitions that are known to have one."""
    if not isinstance(schema, dict):
        return schema is not False
    if any(name not in finite for name in _definition_names(schema)):
        return False
    if not all(_is_finite(one, finite) for one in list_of(schema, "allOf")):
        return False
    if not all(any(_is_finite(one, finite) for one in group) for group in groups_of(schema)):
        return False
    if "const" in schema or "enum" in schema:
        return "const" in schema or schema["enum"] != []
    types = as_list(schema.get("type")) or [schema.get("type")]
    if schema.get("type") == [] or set(types) - {"object", "array"}:
        return True
    return ("object" in types and _has_finite_object(schema, finite)) or (
        "array" in types and _has_finite_array(schema, finite)
    )


def _has_finite_object(schema: Mapping[str, Any], finite: set[str]) -> bool:
    """Returns True if the schema of each required property has a finite instance."""
    properties = map_of(schema, "properties")
    return all(_is_finite(properties.get(name, True), finite) for name in filter(is_text, list_of(schema, "required")))


def _has_finite_array(schema: Mapping[str, Any], finite: set[str]) -> bool:
    """Returns True if no item is required, or the schema of the first one has a finite instance."""
    least = schema.get("minItems", 0)
    first = [*list_of(schema, "prefixItems")[:1], schema.get("items", True)][0]
    return not is_number(least) or least < 1 or isinstance(first, list) or _is_finite(first, finite)


def _definition_names(schema: Mapping[str, Any]) -> list[str]:
    """Returns the name of the definition that ``$ref`` names, in a list; an empty list without such a reference."""
    reference, prefix = schema.get("$ref"), "#/$defs/"
    if isinstance(reference, str) and reference.startswith(prefix):
        return [reference.removeprefix(prefix)]
    return []


def _referenced(schema: Any) -> Iterator[str]:
    """Yields the name of the definition of each reference within a rewritten schema."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            yield from _definition_names(value)
            waiting += _inner(value)


def without_references(schema: Any, paths: set[str]) -> Any:
    """Returns a schema in which every reference to one of ``paths``, such as "#/$defs/a", is replaced by False."""
    if isinstance(schema, list):
        return [without_references(one, paths) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(reference := schema.get("$ref"), str) and reference in paths:
        return False
    result = {}
    for name, one in schema.items():
        if name in ("properties", "patternProperties"):
            result[name] = {key: without_references(inner, paths) for key, inner in one.items()}
        else:
            result[name] = one if name in ("const", "enum") else without_references(one, paths)
    return result


def _inner(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the schemas within a rewritten schema."""
    result: list[Any] = []
    for name, one in schema.items():
        if name in ("properties", "patternProperties"):
            result += one.values()
        elif name not in ("const", "enum"):
            result.append(one)
    return result
