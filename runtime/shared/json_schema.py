"""Rewrites a client's JSON schema into the schema that answers are held to.

Schemas mostly leave ``additionalProperties`` out and mean that there are no other properties. By JSON Schema's letter
such an object is open, and a model invents keys. Here an object with ``properties`` or ``patternProperties`` is closed
unless its schema says otherwise. What ``allOf``, ``$ref``, ``anyOf`` and ``oneOf`` add to an object is merged first.

Annotations are left out, as are formats that JSON Schema doesn't define. References go to one flat ``$defs``, so that a
schema can be written inside another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from .errors import RequestError, shown

MOST_NODES = 1 << 18
"""The most parts of a rewritten schema: keywords, and the names that an object is closed to."""
_DEPTH = 100  # levels of a schema together with the references that are merged into one object
_PASSES = 64
_COMPARED = 64  # alternatives of a oneOf, and values of two of them, that are compared with one another

ENFORCED_FORMATS = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
"""Formats that llguidance holds a text to."""
_STANDARD_FORMATS = ENFORCED_FORMATS | frozenset(
    (
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"),
        *("relative-json-pointer", "regex"),
    )
)
_TYPES = frozenset(("object", "array", "string", "integer", "number", "boolean", "null"))
_DRAFTS = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/(2019-09|2020-12))/schema#?")
_UNSUPPORTED_PATTERN = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9bBkGZ]")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _is_schema_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_type(value: Any) -> bool:
    return all(isinstance(one, str) and one in _TYPES for one in (value if isinstance(value, list) else [value]))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


_COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
_ENFORCED: dict[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "enum": lambda value: isinstance(value, list),
    "const": lambda value: True,
    **dict.fromkeys(("properties", "patternProperties"), _is_schema_map),
    **dict.fromkeys(("additionalProperties", "additionalItems", "unevaluatedProperties"), _is_schema),
    "required": _is_names,
    **dict.fromkeys(_COUNTS, _is_count),
    "items": lambda value: _is_schema(value) or _is_schemas(value),
    **dict.fromkeys(("prefixItems", "allOf", "anyOf", "oneOf"), _is_schemas),
    **dict.fromkeys(("pattern", "format", "$ref"), _is_text),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), _is_number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), lambda value: isinstance(value, (int, float))),
}
"""Keywords that an answer is held to -> a check of their values."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
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
"""Keywords that no answer can be held to -> their values that say nothing."""
KEYWORDS = frozenset(_ENFORCED)
"""Keywords that an answer is held to, where it is JSON."""


@dataclass(frozen=True)
class HeldSchema:
    """A rewritten schema.

    Attributes:
        schema: the schema, of keywords that an answer can be held to.
        ignored: the keywords that it had besides and that say something, each once.
    """

    schema: dict[str, Any] | bool
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Outer:
    """The object that an alternative of ``anyOf`` or ``oneOf`` adds to.

    Attributes:
        names, patterns: the properties that it declares.
        declares: it has ``properties`` itself, so that every alternative is closed.
        typed: it says which types there are.
        is_open: no alternative is closed.
    """

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    declares: bool = False
    typed: bool = False
    is_open: bool = False


@dataclass
class _Declared:
    """The properties that a schema and its alternatives name, in their order."""

    names: dict[str, None]
    patterns: dict[str, None]
    declares: bool

    def add(self, other: _Declared) -> None:
        """Adds those of another schema."""
        self.names |= other.names
        self.patterns |= other.patterns
        self.declares |= other.declares


_OPEN = _Outer(is_open=True)


def hold_schema(schema: Any, place: str, *, lenient: bool = True, prefix: str = "") -> HeldSchema:
    """Returns the schema that answers are held to.

    Args:
        schema: a JSON schema, as decoded JSON.
        place: the field that has it, for errors.
        lenient: constraints that can't be enforced are left out and listed in ``ignored``. Otherwise they stay, and the
            compiler refuses them by name.
        prefix: begins the names in ``$defs``.

    Raises:
        RequestError: it isn't a schema, a reference leads nowhere, it is too large, or nothing finite can meet it.
    """
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError(f"{place}: {shown(schema)} isn't a JSON schema", hint="Pass an object, true or false.")
    rewriter = _Rewriter(schema, place, lenient=lenient, prefix=prefix)
    result = rewriter.rewritten()
    if result is False:
        raise RequestError(f"{place}: nothing can meet it", hint="Pass another schema.")
    return HeldSchema(result, tuple(rewriter.ignored))


class _Rewriter:
    """Rewrites one schema."""

    def __init__(self, root: Any, place: str, *, lenient: bool, prefix: str) -> None:
        self._root, self._place, self._lenient, self._prefix = root, place, lenient, prefix
        self.ignored: dict[str, None] = {}
        self._nodes = 0
        self._definitions: dict[str, Any] = {}
        self._names: dict[tuple[int, _Outer | None], str] = {}
        self._active: set[tuple[int, _Outer | None]] = set()
        self._waiting: list[tuple[Any, str]] = []
        self._declared: dict[int, _Declared] = {}
        self._references = _References(root)

    def rewritten(self) -> Any:
        """Returns the schema, with its definitions."""
        schema = self._close(self._root, None, 0)
        while self._waiting:
            target, name = self._waiting.pop()
            if name not in self._definitions:
                found = self._close(target, None, 0)
                # The target may have become a definition of this name while it was rewritten.
                self._definitions.setdefault(name, found)
        endless = _endless(self._definitions)
        if endless:
            paths = {f"#/$defs/{name}" for name in endless}
            schema = _without(schema, paths)
            self._definitions = {
                name: _without(one, paths) for name, one in self._definitions.items() if name not in endless
            }
        if isinstance(schema, dict) and self._definitions:
            schema = {**schema, "$defs": self._definitions}
        draft = self._root.get("$schema") if isinstance(self._root, Mapping) else None
        if isinstance(schema, dict) and isinstance(draft, str) and _DRAFTS.fullmatch(draft):
            schema = {"$schema": draft, **schema}
        return schema if not isinstance(schema, dict) or not _is_endless(schema, self._definitions) else False

    # Objects

    def _close(self, schema: Any, outer: _Outer | None, depth: int) -> Any:
        """Returns a schema whose objects are closed; ``outer`` is the object that it adds to, if it does."""
        if isinstance(schema, bool):
            if schema and outer is not None and outer.declares and not outer.is_open:
                return self._closed({}, {}, {}, outer)
            return schema
        self._check(schema, depth)
        if outer is None:
            wrapped = self._only_reference(schema)
            if wrapped is not None:
                return self._reference(wrapped)
        key = id(schema), outer
        if key in self._active:
            return {"$ref": f"#/$defs/{self._name(key)}"}
        self._active.add(key)
        result = self._closed_object(schema, outer, depth)
        self._active.remove(key)
        if key in self._names and (name := self._names[key]) not in self._definitions:
            self._definitions[name] = result
            return {"$ref": f"#/$defs/{name}"}
        return result

    def _closed_object(self, schema: dict[str, Any], outer: _Outer | None, depth: int) -> Any:
        parts, sealed = self._parts(schema)
        groups = [group for part in parts for group in _groups(part)]
        rest = schema.get("unevaluatedProperties")
        rest = rest if _is_schema(rest) else None
        if rest is not None:  # it sees its own properties alone
            outer = None
        says = sealed or rest is True or rest == {} or any("additionalProperties" in part for part in parts)
        if says or (outer is not None and outer.is_open):
            return self._counted(self._written(schema, {id(group): _OPEN for group in groups}, depth))
        if outer is None:
            outer = _Outer()
        declared = _Declared(dict.fromkeys(outer.names), dict.fromkeys(outer.patterns), outer.declares)
        for part in parts:
            declared.add(self._declared_here(part, letter=rest is not None))
        closes = declared.declares or rest is not None
        typed = outer.typed or any(part.keys() & {"type", "enum", "const"} for part in parts)
        adding = []
        for group in groups:
            inner = self._declared_by(group)
            if (inner.declares or closes) and not (
                inner.names.keys() <= declared.names.keys() and inner.patterns.keys() <= declared.patterns.keys()
            ):
                adding.append((group, inner))
        if isinstance(rest, dict) and adding:
            raise RequestError(
                f"{self._place}: unevaluatedProperties with a schema can't be enforced next to anyOf or oneOf",
                hint="Declare the properties in each alternative.",
            )
        outers: dict[int, _Outer | None] = {id(group): _OPEN if closes else None for group in groups}
        for group, _ in adding:
            names, patterns = dict(declared.names), dict(declared.patterns)
            for other, inner in adding:
                if other is not group:
                    names |= inner.names
                    patterns |= inner.patterns
            self._count(len(names))
            if names or patterns or closes:
                outers[id(group)] = _Outer(tuple(names), tuple(patterns), closes, typed)
        result = self._written(schema, outers, depth)
        if not closes or adding or result is False:
            return self._counted(result)
        if not typed and not groups:
            result = {"type": "object", **result}
        others: Any = False if rest is None else self._close(rest, None, depth + 1)
        return self._closed(result, declared.names, declared.patterns, outer, others)

    def _closed(
        self,
        result: dict[str, Any],
        names: Mapping[str, None],
        patterns: Mapping[str, None],
        outer: _Outer,
        others: Any = False,
    ) -> dict[str, Any]:
        """Returns an object that has these properties alone, and those of the object that it adds to."""
        types = result.get("type")
        if result.keys() & {"const", "enum"}:
            return result
        if types is not None and "object" not in (types if isinstance(types, list) else [types]):
            return result
        self._count(len(names) + len(patterns) + len(outer.names))
        properties = dict(result.get("properties", {}))
        for name in (*names, *outer.names):
            properties.setdefault(name, True)
        by_pattern = dict(result.get("patternProperties", {}))
        for pattern in (*patterns, *outer.patterns):
            by_pattern.setdefault(pattern, True)
        result = {**result, "properties": properties, "additionalProperties": others}
        if by_pattern:
            result["patternProperties"] = by_pattern
        return self._counted(result)  # type: ignore[no-any-return]

    def _counted(self, result: Any) -> Any:
        """Returns an object without counts of properties that follow from its properties, or can't be enforced."""
        if not isinstance(result, dict) or not result.keys() & {"minProperties", "maxProperties"}:
            return result
        required = set(filter(_is_text, _listed(result, "required")))
        properties = _mapped(result, "properties")
        counts = [result.get(keyword, 1) for keyword in ("minProperties", "maxProperties")]
        if not all(map(_is_count, counts)):
            return result
        closed = result.get("additionalProperties") is False and not result.get("patternProperties")
        if result.get("minProperties", 1) <= len(required):
            result.pop("minProperties", None)
        if closed and result.get("maxProperties", 0) >= len(properties):
            result.pop("maxProperties", None)
        composite = result.keys() & {"allOf", "anyOf", "oneOf"}
        if self._lenient and (composite or properties.keys() - required):
            for keyword in ("minProperties", "maxProperties"):
                if result.pop(keyword, None) is not None:
                    self._ignore(keyword)
        return result

    def _parts(self, schema: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        """Returns the schemas that an instance meets together: this one, those of ``allOf`` and of ``$ref``.

        The second value says that one of them has ``unevaluatedProperties``, which is closed by itself.
        """
        parts: list[dict[str, Any]] = []
        sealed = False
        waiting: list[Any] = [schema]
        seen: set[int] = set()
        while waiting:
            part = waiting.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            if part is not schema and "unevaluatedProperties" in part:
                sealed = True
                continue
            self._count(1)
            parts.append(part)
            waiting += reversed(_listed(part, "allOf"))
            if isinstance(part.get("$ref"), str):
                waiting.append(self._target(part))
        return parts, sealed

    def _declared_here(self, part: dict[str, Any], *, letter: bool = False, depth: int = 0) -> _Declared:
        """Returns the properties that a schema itself names. By the ``letter`` a required one isn't declared."""
        properties, patterns = _mapped(part, "properties"), _mapped(part, "patternProperties")
        names = dict.fromkeys(properties)
        if not letter:
            names |= dict.fromkeys(filter(_is_text, _listed(part, "required")))
        for keyword in ("dependentRequired", "dependencies"):
            for name, others in _mapped(part, keyword).items():
                names |= dict.fromkeys([name, *filter(_is_text, _items(others))])
        patterns = {pattern: None for pattern in patterns if not self._unsupported(pattern)}
        declares = any(isinstance(part.get(keyword), dict) for keyword in ("properties", "patternProperties"))
        declared = _Declared(names, dict.fromkeys(patterns), declares)
        schemas = [part.get(keyword) for keyword in ("if", "then", "else")]
        for keyword in ("dependentSchemas", "dependencies"):
            schemas += _mapped(part, keyword).values()
        for one in schemas:
            if isinstance(one, dict):
                declared.add(self._declared_by([one], depth + 1))
        return declared

    def _declared_by(self, schemas: Sequence[Any], depth: int = 0) -> _Declared:
        """Returns the properties that any of some schemas names, with what they are merged of."""
        self._check({}, depth)
        result = _Declared({}, {}, False)
        for schema in schemas:
            if not isinstance(schema, dict):
                continue
            if (known := self._declared.get(id(schema))) is None:
                known = self._declared[id(schema)] = _Declared({}, {}, False)  # a cycle adds nothing
                for part in self._parts(schema)[0]:
                    known.add(self._declared_here(part, depth=depth))
                    for group in _groups(part):
                        known.add(self._declared_by(group, depth + 1))
            self._count(len(known.names))
            result.add(known)
        return result

    # Keywords

    def _written(self, part: dict[str, Any], outers: Mapping[int, _Outer | None], depth: int) -> Any:
        """Returns a schema with what it is merged of; ``outers`` has an entry for each list of alternatives."""
        self._check(part, depth)
        result: dict[str, Any] = {}
        merged: list[Any] = []
        for keyword, value in self._enforceable(part):
            if keyword in ("properties", "patternProperties"):
                each = {name: self._close(one, None, depth + 1) for name, one in value.items()}
                if keyword == "patternProperties" and any(map(self._unsupported, each)):
                    self._ignore(keyword)
                    others = [one for name, one in each.items() if self._unsupported(name)]
                    each = {name: one for name, one in each.items() if not self._unsupported(name)}
                    result["additionalProperties"] = others[0] if len(others) == 1 else {"anyOf": others}
                result[keyword] = each
            elif keyword in ("additionalProperties", "additionalItems") or (
                keyword == "items" and not isinstance(value, list)
            ):
                result.setdefault(keyword, self._close(value, None, depth + 1))
            elif keyword in ("items", "prefixItems"):
                result[keyword] = [self._close(one, None, depth + 1) for one in value]
            elif keyword == "$ref":
                target = self._target(part)
                merged.append({"$ref": value} if target is None else self._merged(target, outers, depth))
            elif keyword == "allOf":
                merged += [self._merged(one, outers, depth) for one in value]
            elif keyword in ("anyOf", "oneOf"):
                alternatives = [self._close(one, outers.get(id(value)), depth + 1) for one in value]
                if keyword == "oneOf" and not self._disjoint(alternatives, value):
                    if self._lenient:
                        self._ignore(keyword)
                    else:  # the compiler looks whether they are, without what closing them adds
                        merged.append({keyword: [self._close(one, _OPEN, depth + 1) for one in value]})
                if "anyOf" in result:
                    merged.append({"anyOf": alternatives})
                else:
                    result["anyOf"] = alternatives
            elif keyword != "unevaluatedProperties":
                result[keyword] = value
        merged = [one for one in merged if one is not True and one != {}]
        if merged:
            if not result and len(merged) == 1:
                return merged[0]
            result["allOf"] = merged
        return result

    def _merged(self, schema: Any, outers: Mapping[int, _Outer | None], depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if "unevaluatedProperties" in schema:
            return self._close(schema, None, depth + 1)
        return self._counted(self._written(schema, outers, depth + 1))

    def _enforceable(self, part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yields the keywords that an answer is held to, and says which others there are."""
        part = _names_as_properties(part)
        for keyword, value in part.items():
            if keyword in _COUNTS and isinstance(value, float) and value.is_integer():
                value = int(value)
            if keyword in _NEUTRAL:
                if value in _NEUTRAL[keyword] or (keyword in ("then", "else") and "if" not in part):
                    continue
                if keyword in ("minContains", "maxContains") and "contains" not in part:
                    continue
                if self._lenient:
                    self._ignore(keyword)
                else:
                    yield keyword, value
            elif (fits := _ENFORCED.get(keyword)) is not None:
                if keyword == "format" and fits(value):
                    if value not in ENFORCED_FORMATS and (self._lenient or value not in _STANDARD_FORMATS):
                        self._ignore(keyword)
                        continue
                elif keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):  # draft 4
                    bound = part.get("minimum" if keyword == "exclusiveMinimum" else "maximum")
                    if not value or not _is_number(bound):
                        continue
                    value = bound
                elif self._lenient and (not fits(value) or (keyword == "pattern" and self._unsupported(value))):
                    self._ignore(keyword)
                    continue
                elif not fits(value):
                    raise RequestError(
                        f"{self._place}: {keyword}: {shown(value)} isn't taken", hint="Pass a valid JSON schema."
                    )
                yield keyword, value

    def _disjoint(self, closed: Sequence[Any], schemas: Sequence[Any]) -> bool:
        """Returns True if no instance of a closed alternative meets another one, closed or not.

        Only what is easily seen counts: types, values, and properties that one requires and another doesn't have.
        """
        if len(schemas) > _COMPARED:
            return False
        first, second = [self._resolved(one) for one in closed], [self._original(one) for one in schemas]
        return all(_are_disjoint(a, b) for i, a in enumerate(first) for k, b in enumerate(second) if i != k)

    def _resolved(self, schema: Any) -> Any:
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        name = schema["$ref"].removeprefix("#/$defs/")
        waiting = next((target for target, known in self._waiting if known == name), None)
        if name in self._definitions or waiting is None:
            return self._definitions.get(name)
        names = self._parts(waiting)[0] == [waiting] and not _groups(waiting) and self._declared_here(waiting).names
        if not names or "additionalProperties" in waiting or "patternProperties" in waiting:
            return waiting
        return {"type": "object", **waiting, "properties": {**dict.fromkeys(names, True), **waiting["properties"]}} | {
            "additionalProperties": False
        }

    def _original(self, schema: Any) -> Any:
        target = self._only_reference(schema) if isinstance(schema, dict) else None
        return schema if target is None else target

    def _unsupported(self, pattern: str) -> bool:
        """Returns True for a pattern with what no automaton has: look-around, references, ends of words."""
        return self._lenient and _UNSUPPORTED_PATTERN.search(pattern.replace("\\\\", "")) is not None

    # References

    def _only_reference(self, schema: dict[str, Any]) -> Any:
        """Returns the target of a schema that is a reference alone, with annotations or not; None of any other."""
        while True:
            said = schema.keys() & (KEYWORDS | _NEUTRAL.keys())
            inner = schema.get("allOf")
            if said == {"allOf"} and isinstance(inner, list) and len(inner) == 1 and isinstance(inner[0], dict):
                schema = inner[0]
            elif said == {"$ref"} and isinstance(schema["$ref"], str):
                return self._target(schema)
            else:
                return None

    def _target(self, schema: dict[str, Any]) -> Any:
        """Returns the schema that ``$ref`` leads to; None where it leads out of the document."""
        target = self._references.target(schema)
        if target is None and schema["$ref"].startswith("#"):
            raise RequestError(
                f"{self._place}: $ref {shown(schema['$ref'])} leads nowhere", hint="Put its target into $defs."
            )
        return target

    def _reference(self, target: Any) -> Any:
        if isinstance(target, bool):
            return target
        key = id(target), None
        if key not in self._names:
            name = self._name(key)
            if key not in self._active:
                self._waiting.append((target, name))
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _name(self, key: tuple[int, _Outer | None]) -> str:
        if key not in self._names:
            self._names[key] = f"{self._prefix}{len(self._names)}"
        return self._names[key]

    # Bounds

    def _check(self, schema: Any, depth: int) -> None:
        if not isinstance(schema, dict):
            raise RequestError(f"{self._place}: {shown(schema)} isn't a JSON schema", hint="Pass an object.")
        if depth > _DEPTH:
            raise RequestError(
                f"{self._place}: with its references it is more than {_DEPTH} levels deep", hint="Make it simpler."
            )
        self._count(1 + len(schema))

    def _count(self, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MOST_NODES:
            raise RequestError(
                f"{self._place}: merged it has more than {MOST_NODES:,} keywords and names", hint="Make it simpler."
            )

    def _ignore(self, keyword: str) -> None:
        self.ignored[keyword] = None


class _References:
    """Finds the targets of references in one document.

    ``$id`` begins a resource of its own, within which references are resolved, unless it is a fragment alone.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._indexed = False
        self._resources: dict[int, tuple[Any, str]] = {}  # of schemas outside the root's resource
        self._uris: dict[str, Any] = {}
        self._anchors: dict[tuple[int, str], Any] = {}

    def target(self, schema: Mapping[str, Any]) -> Any:
        """Returns the schema that a schema's ``$ref`` leads to, if that is within the document."""
        if not self._indexed:
            self._index()
        resource, base = self._resources.get(id(schema), (self._root, self._base))
        reference = schema["$ref"]
        if not reference.startswith("#"):
            uri, fragment = urldefrag(_joined(base, reference))
            resource = self._uris.get(uri)
            if resource is None:
                return None
        else:
            fragment = reference[1:]
        fragment = unquote(fragment)
        if not fragment.startswith("/"):
            target = resource if not fragment else self._anchors.get((id(resource), fragment))
        else:
            target = resource
            for part in fragment[1:].split("/"):
                part = part.replace("~1", "/").replace("~0", "~")
                if isinstance(target, dict):
                    target = target.get(part)
                elif isinstance(target, list) and part.isdecimal() and len(part) < 8 and int(part) < len(target):
                    target = target[int(part)]
                else:
                    return None
        return target if isinstance(target, (dict, bool)) else None

    def _index(self) -> None:
        self._indexed = True
        own = self._root.get("$id") if isinstance(self._root, dict) else None
        self._base = urldefrag(own)[0] if isinstance(own, str) else ""
        if self._base:
            self._uris[self._base] = self._root
        waiting: list[tuple[Any, Any, str]] = [(self._root, self._root, self._base)]
        while waiting:
            value, resource, base = waiting.pop()
            if isinstance(value, list):
                waiting += [(one, resource, base) for one in value]
            elif isinstance(value, dict):
                own = value.get("$id")
                if value is not self._root and isinstance(own, str) and not own.startswith("#"):
                    base = urldefrag(_joined(base, own))[0]
                    resource = value
                    self._uris.setdefault(base, value)
                if resource is not self._root:
                    self._resources[id(value)] = resource, base
                if isinstance(anchor := value.get("$anchor", value.get("$dynamicAnchor")), str):
                    self._anchors.setdefault((id(resource), anchor), value)
                waiting += [
                    (one, resource, base)
                    for name, one in value.items()
                    if name not in ("const", "enum", "default", "examples") and isinstance(one, (dict, list))
                ]


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def _listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    return _items(schema.get(keyword))


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapped(schema: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def _groups(part: Mapping[str, Any]) -> list[list[Any]]:
    """Returns the lists of alternatives that a schema itself has."""
    return [part[keyword] for keyword in ("anyOf", "oneOf") if isinstance(part.get(keyword), list)]


def _names_as_properties(part: dict[str, Any]) -> dict[str, Any]:
    """Returns a map whose keys have a pattern or are listed with these as its properties, which says the same."""
    names = part.get("propertyNames")
    if not isinstance(names, dict) or part.keys() & {"properties", "patternProperties"}:
        return part
    held = names.keys() & (KEYWORDS | _NEUTRAL.keys()) - {"type"}
    if names.get("type", "string") != "string" or len(held) != 1:
        return part
    value = part.get("additionalProperties", part.get("unevaluatedProperties", True))
    result = {k: one for k, one in part.items() if k not in ("propertyNames", "unevaluatedProperties")}
    if held == {"pattern"} and isinstance(names["pattern"], str):
        return {**result, "patternProperties": {names["pattern"]: value}, "additionalProperties": False}
    if held == {"enum"} and _is_names(names["enum"]):
        return {**result, "properties": dict.fromkeys(names["enum"], value), "additionalProperties": False}
    return part


# Alternatives


def _types(schema: Any) -> set[str] | None:
    """Returns the types that a schema allows; None where it doesn't say."""
    if not isinstance(schema, dict):
        return None
    if (values := _values(schema)) is not None:
        return {_type_name(value) for value in values}
    types = schema.get("type")
    if types is None or not _is_type(types):
        return None
    return {"number" if one == "integer" else one for one in (types if isinstance(types, list) else [types])}


def _type_name(value: Any) -> str:
    names: dict[type, str] = {bool: "boolean", str: "string", int: "number", float: "number", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def _are_disjoint(a: Any, b: Any) -> bool:
    """Returns True if two schemas have no instance in common, as far as that is easily seen."""
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    types_a, types_b = _types(a), _types(b)
    if types_a is not None and types_b is not None and not types_a & types_b:
        return True
    values_a, values_b = _values(a), _values(b)
    if values_a is not None and values_b is not None:
        return _have_none_in_common(values_a, values_b)
    if types_a != {"object"}:
        return False
    required = set(filter(_is_text, _listed(b, "required")))
    inner_a, inner_b = _mapped(a, "properties"), _mapped(b, "properties")
    closed = a.get("additionalProperties") is False and not a.get("patternProperties")
    if closed and required - inner_a.keys():
        return True
    for name in required.intersection(filter(_is_text, _listed(a, "required"))):
        first, second = inner_a.get(name), inner_b.get(name)
        values_a, values_b = _values(first), _values(second)
        if values_a is not None and values_b is not None and _have_none_in_common(values_a, values_b):
            return True
        types_a, types_b = _types(first), _types(second)
        if types_a is not None and types_b is not None and not types_a & types_b:
            return True
    return False


def _have_none_in_common(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) * len(b) <= _COMPARED**2 and not any(value in b for value in a)


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


# Instances without end


def _endless(definitions: Mapping[str, Any]) -> set[str]:
    """Returns the definitions that only instances without end meet: those that require themselves."""
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


def _is_endless(schema: Any, definitions: Mapping[str, Any]) -> bool:
    return not _is_finite({k: v for k, v in schema.items() if k != "$defs"}, set(definitions))


def _is_finite(schema: Any, finite: set[str]) -> bool:
    """Returns True if a schema has an instance that ends, given the definitions that have one."""
    if not isinstance(schema, dict):
        return schema is not False
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/") and reference[8:] not in finite:
        return False
    if not all(_is_finite(one, finite) for one in _listed(schema, "allOf")):
        return False
    for group in _groups(schema):
        if not any(_is_finite(one, finite) for one in group):
            return False
    if "const" in schema or "enum" in schema:
        return "const" in schema or schema["enum"] != []
    types = schema.get("type")
    each = types if isinstance(types, list) else [types]
    if types == [] or set(each) - {"object", "array"}:
        return True
    properties = _mapped(schema, "properties")
    if "object" in each and all(
        _is_finite(properties.get(name, True), finite) for name in _listed(schema, "required") if isinstance(name, str)
    ):
        return True
    least = schema.get("minItems", 0)
    first = [*_listed(schema, "prefixItems")[:1], schema.get("items", True)][0]
    return "array" in each and (
        not _is_number(least) or least < 1 or isinstance(first, list) or _is_finite(first, finite)
    )


def _referenced(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str) and reference.startswith("#/$defs/"):
                yield reference[8:]
            waiting += _inner(value)


def _without(schema: Any, paths: set[str]) -> Any:
    """Returns a schema in which references to some definitions can't be met."""
    if isinstance(schema, list):
        return [_without(one, paths) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(reference := schema.get("$ref"), str) and reference in paths:
        return False
    result = {}
    for name, one in schema.items():
        if name in ("properties", "patternProperties"):
            result[name] = {key: _without(inner, paths) for key, inner in one.items()}
        else:
            result[name] = one if name in ("const", "enum") else _without(one, paths)
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
