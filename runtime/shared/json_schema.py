"""Rewrites a client's JSON schema to the schema that answers must follow.

Most schemas omit ``additionalProperties`` and mean that there are no other properties. By JSON Schema's definition such
an object is open, and a model would invent keys. Here an object with ``properties`` or ``patternProperties`` is closed
unless its schema says otherwise. What ``allOf``, ``$ref``, ``anyOf`` and ``oneOf`` add to an object is merged first.

Annotations are left out, as are formats that JSON Schema doesn't define. All definitions are in one flat ``$defs``, so
that a schema can be written inside another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from .errors import RequestError, shown
from .json_schema_instances import (
    are_disjoint,
    as_list,
    endless_definitions,
    groups_of,
    is_endless,
    list_of,
    map_of,
    without_references,
)
from .json_schema_keywords import (
    COUNTS,
    ENFORCED,
    ENFORCED_FORMATS,
    KEYWORDS,
    NEUTRAL,
    STANDARD_FORMATS,
    is_count,
    is_names,
    is_number,
    is_schema,
    is_text,
)
from .json_schema_references import References

MOST_NODES = 1 << 18
"""The most parts of a rewritten schema: keywords, and the names that an object is closed to."""
_DEPTH = 100  # levels of a schema together with the references that are merged into one object
_COMPARED = 64  # alternatives of a oneOf that are compared with one another
_DRAFTS = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/(2019-09|2020-12))/schema#?")
_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
"""Keywords that are booleans in draft 4 -> the keyword that has the number of the bound."""
_DEPENDENT = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords that have an effect only together with another keyword -> that keyword."""
_UNSUPPORTED_PATTERN = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9bBkGZ]")


class HeldSchema(msgspec.Struct, frozen=True):
    """A rewritten schema.

    Attributes:
        schema: the schema, with only keywords that can be enforced.
        ignored: the other keywords of the original that have an effect, each once.
    """

    schema: dict[str, Any] | bool
    ignored: tuple[str, ...] = ()


class _Outer(msgspec.Struct, frozen=True):
    """The facts about an object that one of its alternatives (in ``anyOf`` or ``oneOf``) needs to be closed.

    Attributes:
        names, patterns: the properties that the object declares outside of the alternative.
        declares: True if the object has ``properties`` itself, so that every alternative is closed.
        typed: True if the object restricts its types.
        is_open: True if no alternative is closed.
    """

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    declares: bool = False
    typed: bool = False
    is_open: bool = False


class _Parts(msgspec.Struct):
    """A schema and the schemas of its ``allOf`` and ``$ref``: an instance has to meet all of them.

    Attributes:
        parts: these schemas. Nested ones with ``unevaluatedProperties`` are left out, as they close their own object.
        sealed: True if such a nested schema was left out.
    """

    parts: list[dict[str, Any]]
    sealed: bool = False

    @property
    def groups(self) -> list[list[Any]]:
        """The ``anyOf`` and ``oneOf`` lists of all parts."""
        return [group for part in self.parts for group in groups_of(part)]

    @property
    def says_others(self) -> bool:
        """True if one of the schemas states explicitly which undeclared properties are allowed."""
        return self.sealed or any("additionalProperties" in part for part in self.parts)

    @property
    def is_typed(self) -> bool:
        """True if one of the schemas has ``type``, ``enum`` or ``const``."""
        return any(part.keys() & {"type", "enum", "const"} for part in self.parts)


class _Declared(msgspec.Struct):
    """The properties that a schema and its alternatives name, in the schema's order.

    Attributes:
        names, patterns: the names, and the patterns of names, as keys.
        declares: True if one of the schemas has ``properties`` or ``patternProperties``.
    """

    names: dict[str, None]
    patterns: dict[str, None]
    declares: bool

    def add(self, other: _Declared) -> None:
        """Adds the names and patterns of ``other``."""
        self.names |= other.names
        self.patterns |= other.patterns
        self.declares |= other.declares

    def is_within(self, other: _Declared) -> bool:
        """Returns True if ``other`` has all names and patterns of this one."""
        return self.names.keys() <= other.names.keys() and self.patterns.keys() <= other.patterns.keys()


class _Draft(msgspec.Struct):
    """A schema while it is rewritten.

    Attributes:
        source: the original schema.
        outers: ``id`` of a list of alternatives -> the object that these alternatives are part of.
        depth: the number of schemas around this one.
        result: the rewritten keywords.
        merged: the schemas that an instance must meet besides ``result``.
    """

    source: dict[str, Any]
    outers: Mapping[int, _Outer | None]
    depth: int
    result: dict[str, Any] = msgspec.field(default_factory=dict)
    merged: list[Any] = msgspec.field(default_factory=list)


_OPEN = _Outer(is_open=True)


def hold_schema(schema: Any, place: str, *, lenient: bool = True, prefix: str = "") -> HeldSchema:
    """Rewrites a schema to one that answers can be forced to follow.

    Args:
        schema: a JSON schema, as decoded JSON.
        place: the field that contains it, for errors.
        lenient: True leaves out constraints that can't be enforced and lists them in ``ignored``; False keeps them, and
            the compiler refuses them by name.
        prefix: the prefix of the names in ``$defs``.

    Raises:
        RequestError: it isn't a valid schema, a reference has no target, it is too large, or no finite instance meets
            it.
    """
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError(f"{place}: {shown(schema)} isn't a JSON schema", hint="Pass an object, true or false.")
    rewriter = _Rewriter(schema, place, lenient=lenient, prefix=prefix)
    result = rewriter.rewritten()
    if result is False:
        raise RequestError(f"{place}: nothing can meet it", hint="Pass another schema.")
    return HeldSchema(result, tuple(rewriter.ignored))


class _Rewriter:
    """Rewrites one schema, given as ``root``. The arguments are those of ``hold_schema``."""

    def __init__(self, root: Any, place: str, *, lenient: bool, prefix: str) -> None:
        self._root, self._place, self._lenient, self._prefix = root, place, lenient, prefix
        self.ignored: dict[str, None] = {}
        self._nodes = 0
        self._definitions: dict[str, Any] = {}
        self._names: dict[tuple[int, _Outer | None], str] = {}
        self._active: set[tuple[int, _Outer | None]] = set()
        self._waiting: list[tuple[Any, str]] = []
        self._declared: dict[int, _Declared] = {}
        self._references = References(root)

    def rewritten(self) -> Any:
        """Returns the rewritten schema with its definitions in ``$defs``; False if no finite instance meets it."""
        schema = self._close(self._root, None, 0)
        while self._waiting:
            target, name = self._waiting.pop()
            if name not in self._definitions:
                closed = self._close(target, None, 0)
                # The target may have become a definition of this name while it was rewritten.
                self._definitions.setdefault(name, closed)
        endless = endless_definitions(self._definitions)
        if endless:
            paths = {f"#/$defs/{name}" for name in endless}
            schema = without_references(schema, paths)
            self._definitions = {
                name: without_references(one, paths) for name, one in self._definitions.items() if name not in endless
            }
        if isinstance(schema, dict) and self._definitions:
            schema = {**schema, "$defs": self._definitions}
        draft = self._root.get("$schema") if isinstance(self._root, Mapping) else None
        if isinstance(schema, dict) and isinstance(draft, str) and _DRAFTS.fullmatch(draft):
            schema = {"$schema": draft, **schema}
        return schema if not isinstance(schema, dict) or not is_endless(schema, self._definitions) else False

    # Objects

    def _close(self, schema: Any, outer: _Outer | None, depth: int) -> Any:
        """Returns the rewritten schema, in which objects with declared properties allow no others.

        Args:
            schema: the original schema.
            outer: the object of which the schema is an alternative; None if it is no alternative.
            depth: the number of schemas around it.
        """
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
        whole = self._parts(schema)
        rest = schema.get("unevaluatedProperties")
        rest = rest if is_schema(rest) else None
        if outer is None or rest is not None:  # unevaluatedProperties applies to this object's own properties alone
            outer = _Outer()
        if whole.says_others or rest in (True, {}) or outer.is_open:
            return self._counted(self._written(schema, {id(group): _OPEN for group in whole.groups}, depth))
        declared = _Declared(dict.fromkeys(outer.names), dict.fromkeys(outer.patterns), outer.declares)
        for part in whole.parts:
            declared.add(self._declared_here(part, letter=rest is not None))
        closes = declared.declares or rest is not None
        typed = outer.typed or whole.is_typed
        adding = self._adding(whole.groups, declared, closes=closes)
        if isinstance(rest, dict) and adding:
            raise RequestError(
                f"{self._place}: unevaluatedProperties with a schema can't be enforced next to anyOf or oneOf",
                hint="Declare the properties in each alternative.",
            )
        outers = self._outers(whole.groups, adding, declared, closes=closes, typed=typed)
        result = self._written(schema, outers, depth)
        if not closes or adding or result is False:
            return self._counted(result)
        if not typed and not whole.groups:
            result = {"type": "object", **result}
        others: Any = False if rest is None else self._close(rest, None, depth + 1)
        return self._closed(result, declared.names, declared.patterns, outer, others)

    def _adding(self, groups: Sequence[list[Any]], declared: _Declared, *, closes: bool) -> dict[int, _Declared]:
        """Returns the groups of alternatives that declare properties which their object doesn't.

        The result is: ``id`` of a group -> the properties that it declares.

        Args:
            groups: the ``anyOf`` and ``oneOf`` lists of an object.
            declared: the properties of the object itself.
            closes: True if the object is closed. Then a property that an alternative only requires counts too.
        """
        inner = {id(group): self._declared_by(group) for group in groups}
        return {key: one for key, one in inner.items() if (one.declares or closes) and not one.is_within(declared)}

    def _outers(
        self,
        groups: Sequence[list[Any]],
        adding: Mapping[int, _Declared],
        declared: _Declared,
        *,
        closes: bool,
        typed: bool,
    ) -> dict[int, _Outer | None]:
        """Returns ``id`` of a group of alternatives -> the facts with which its alternatives are closed; None leaves
        them as is.

        An alternative of a group that adds properties may have those of the object and of the other groups too, as an
        instance meets all of them.

        Args:
            groups: the ``anyOf`` and ``oneOf`` lists of an object.
            adding: the result of ``_adding``.
            declared: the properties of the object itself.
            closes: True if the object is closed.
            typed: True if the object restricts its types.
        """
        outers: dict[int, _Outer | None] = {id(group): _OPEN if closes else None for group in groups}
        for key in adding:
            together = _Declared(dict(declared.names), dict(declared.patterns), declares=closes)
            for other, inner in adding.items():
                if other != key:
                    together.add(inner)
            self._count(len(together.names))
            names, patterns = tuple(together.names), tuple(together.patterns)
            outers[key] = _Outer(names, patterns, closes, typed) if names or patterns or closes else None
        return outers

    def _closed(
        self,
        result: dict[str, Any],
        names: Mapping[str, None],
        patterns: Mapping[str, None],
        outer: _Outer,
        others: Any = False,
    ) -> dict[str, Any]:
        """Returns ``result``, a rewritten object, with ``additionalProperties`` for every property that isn't declared.

        Args:
            result: the rewritten keywords.
            names, patterns: the properties that the object declares.
            outer: the object of which it is an alternative. The properties of that one are allowed too.
            others: the schema of all other properties; False forbids them.
        """
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
        """Returns an object without ``minProperties`` or ``maxProperties`` where its properties imply it or it can't be
        enforced.
        """
        if not isinstance(result, dict) or not result.keys() & {"minProperties", "maxProperties"}:
            return result
        required = set(filter(is_text, list_of(result, "required")))
        properties = map_of(result, "properties")
        counts = [result.get(keyword, 1) for keyword in ("minProperties", "maxProperties")]
        if not all(map(is_count, counts)):
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

    def _parts(self, schema: dict[str, Any]) -> _Parts:
        """Collects a schema and, recursively, the schemas of its ``allOf`` and ``$ref``."""
        whole = _Parts([])
        waiting: list[Any] = [schema]
        seen: set[int] = set()
        while waiting:
            part = waiting.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            if part is not schema and "unevaluatedProperties" in part:
                whole.sealed = True
                continue
            self._count(1)
            whole.parts.append(part)
            waiting += reversed(list_of(part, "allOf"))
            if isinstance(part.get("$ref"), str):
                waiting.append(self._target(part))
        return whole

    def _declared_here(self, part: dict[str, Any], *, letter: bool = False, depth: int = 0) -> _Declared:
        """Returns the properties that a schema names without its ``allOf``, ``$ref`` and alternatives.

        Args:
            part: the schema.
            letter: False counts a property as declared also if ``required`` alone names it.
            depth: the number of schemas around it.
        """
        properties, patterns = map_of(part, "properties"), map_of(part, "patternProperties")
        names = dict.fromkeys(properties)
        if not letter:
            names |= dict.fromkeys(filter(is_text, list_of(part, "required")))
        for keyword in ("dependentRequired", "dependencies"):
            for name, others in map_of(part, keyword).items():
                names |= dict.fromkeys([name, *filter(is_text, as_list(others))])
        patterns = {pattern: None for pattern in patterns if not self._unsupported(pattern)}
        declares = any(isinstance(part.get(keyword), dict) for keyword in ("properties", "patternProperties"))
        declared = _Declared(names, dict.fromkeys(patterns), declares)
        schemas = [part.get(keyword) for keyword in ("if", "then", "else")]
        for keyword in ("dependentSchemas", "dependencies"):
            schemas += map_of(part, keyword).values()
        for one in schemas:
            if isinstance(one, dict):
                declared.add(self._declared_by([one], depth + 1))
        return declared

    def _declared_by(self, schemas: Sequence[Any], depth: int = 0) -> _Declared:
        """Returns the properties that at least one of ``schemas`` names, including its ``allOf``, ``$ref`` and
        alternatives.
        """
        self._check({}, depth)
        result = _Declared({}, {}, False)
        for schema in schemas:
            if not isinstance(schema, dict):
                continue
            if (known := self._declared.get(id(schema))) is None:
                known = self._declared[id(schema)] = _Declared({}, {}, False)  # a cycle adds nothing
                for part in self._parts(schema).parts:
                    known.add(self._declared_here(part, depth=depth))
                    for group in groups_of(part):
                        known.add(self._declared_by(group, depth + 1))
            self._count(len(known.names))
            result.add(known)
        return result

    # Keywords

    def _written(self, part: dict[str, Any], outers: Mapping[int, _Outer | None], depth: int) -> Any:
        """Returns a schema together with the schemas that are merged into it.

        Args:
            part: the schema.
            outers: the object that the alternatives of a group add to, by the ``id`` of the group.
            depth: the levels of schemas around this one.
        """
        self._check(part, depth)
        draft = _Draft(part, outers, depth)
        for keyword, value in self._enforceable(part):
            write = self._WRITERS.get(keyword)
            if write is not None:
                write(self, draft, keyword, value)
            elif keyword != "unevaluatedProperties":  # _closed_object has applied it
                draft.result[keyword] = value
        merged = [one for one in draft.merged if one is not True and one != {}]
        if merged:
            if not draft.result and len(merged) == 1:
                return merged[0]
            draft.result["allOf"] = merged
        return draft.result

    def _write_schema(self, draft: _Draft, keyword: str, value: Any) -> None:
        draft.result.setdefault(keyword, self._close(value, None, draft.depth + 1))

    def _write_schemas(self, draft: _Draft, keyword: str, value: Any) -> None:
        draft.result[keyword] = [self._close(one, None, draft.depth + 1) for one in value]

    def _write_items(self, draft: _Draft, keyword: str, value: Any) -> None:
        write = self._write_schemas if isinstance(value, list) else self._write_schema
        write(draft, keyword, value)

    def _write_properties(self, draft: _Draft, keyword: str, value: Any) -> None:
        draft.result[keyword] = {name: self._close(one, None, draft.depth + 1) for name, one in value.items()}

    def _write_patterns(self, draft: _Draft, keyword: str, value: Any) -> None:
        """Writes ``patternProperties``.

        A pattern that the compiler doesn't support is dropped. Its schema then applies to all properties without
        another one.
        """
        by_pattern = {pattern: self._close(one, None, draft.depth + 1) for pattern, one in value.items()}
        others = [by_pattern.pop(pattern) for pattern in value if self._unsupported(pattern)]
        if others:
            self._ignore(keyword)
            draft.result["additionalProperties"] = others[0] if len(others) == 1 else {"anyOf": others}
        draft.result[keyword] = by_pattern

    def _write_reference(self, draft: _Draft, keyword: str, value: Any) -> None:
        target = self._target(draft.source)
        draft.merged.append({keyword: value} if target is None else self._merged(target, draft.outers, draft.depth))

    def _write_parts(self, draft: _Draft, keyword: str, value: Any) -> None:
        draft.merged += [self._merged(one, draft.outers, draft.depth) for one in value]

    def _write_alternatives(self, draft: _Draft, keyword: str, value: Any) -> None:
        """Writes ``anyOf``, and ``oneOf`` as ``anyOf``.

        A ``oneOf`` whose alternatives may overlap is listed as ignored.
        """
        alternatives = [self._close(one, draft.outers.get(id(value)), draft.depth + 1) for one in value]
        if keyword == "oneOf" and not self._disjoint(alternatives, value):
            if self._lenient:
                self._ignore(keyword)
            else:  # the compiler checks that they are disjoint, without the properties that closing them adds
                draft.merged.append({keyword: [self._close(one, _OPEN, draft.depth + 1) for one in value]})
        if "anyOf" in draft.result:
            draft.merged.append({"anyOf": alternatives})
        else:
            draft.result["anyOf"] = alternatives

    _WRITERS: ClassVar[dict[str, Callable[[_Rewriter, _Draft, str, Any], None]]] = {
        "properties": _write_properties,
        "patternProperties": _write_patterns,
        "additionalProperties": _write_schema,
        "items": _write_items,
        "additionalItems": _write_schema,
        "prefixItems": _write_schemas,
        "$ref": _write_reference,
        "allOf": _write_parts,
        "anyOf": _write_alternatives,
        "oneOf": _write_alternatives,
    }
    """Keywords whose values contain schemas -> the method that writes them. Other keywords are copied."""

    def _merged(self, schema: Any, outers: Mapping[int, _Outer | None], depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if "unevaluatedProperties" in schema:
            return self._close(schema, None, depth + 1)
        return self._counted(self._written(schema, outers, depth + 1))

    def _enforceable(self, part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yields (keyword, value) of the keywords that an answer can be forced to meet, and notes the others as
        ignored.
        """
        part = _names_as_properties(part)
        for keyword, value in part.items():
            if keyword in COUNTS and isinstance(value, float) and value.is_integer():
                value = int(value)
            if keyword in _BOUNDS and isinstance(value, bool):  # draft 4
                value = part.get(_BOUNDS[keyword]) if value else None
                if not is_number(value):
                    continue
            if keyword in NEUTRAL:
                if _is_neutral(part, keyword, value):
                    continue
                enforceable = not self._lenient
            elif keyword in ENFORCED:
                enforceable = self._is_enforceable(keyword, value)
            else:
                continue
            if enforceable:
                yield keyword, value
            else:
                self._ignore(keyword)

    def _is_enforceable(self, keyword: str, value: Any) -> bool:
        """Returns True if an answer can be forced to meet this value of a keyword of ``ENFORCED``.

        Raises RequestError for a value that JSON Schema doesn't allow, if the rewriting isn't lenient.
        """
        if not ENFORCED[keyword](value):
            if self._lenient:
                return False
            raise RequestError(
                f"{self._place}: {keyword}: {shown(value)} isn't taken", hint="Pass a valid JSON schema."
            )
        if keyword == "format":
            return value in ENFORCED_FORMATS or (not self._lenient and value in STANDARD_FORMATS)
        return keyword != "pattern" or not self._unsupported(value)

    def _disjoint(self, closed: Sequence[Any], schemas: Sequence[Any]) -> bool:
        """Returns True if no instance meets two of the alternatives, as far as their types, values and required
        properties tell.

        Args:
            closed: the rewritten alternatives.
            schemas: the original ones.
        """
        if len(schemas) > _COMPARED:
            return False
        first, second = [self._resolved(one) for one in closed], [self._original(one) for one in schemas]
        return all(are_disjoint(a, b) for i, a in enumerate(first) for k, b in enumerate(second) if i != k)

    def _resolved(self, schema: Any) -> Any:
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        name = schema["$ref"].removeprefix("#/$defs/")
        waiting = next((target for target, known in self._waiting if known == name), None)
        if name in self._definitions or waiting is None:
            return self._definitions.get(name)
        names = (
            self._parts(waiting).parts == [waiting] and not groups_of(waiting) and self._declared_here(waiting).names
        )
        if not names or "additionalProperties" in waiting or "patternProperties" in waiting:
            return waiting
        return {"type": "object", **waiting, "properties": {**dict.fromkeys(names, True), **waiting["properties"]}} | {
            "additionalProperties": False
        }

    def _original(self, schema: Any) -> Any:
        target = self._only_reference(schema) if isinstance(schema, dict) else None
        return schema if target is None else target

    def _unsupported(self, pattern: str) -> bool:
        """Returns True for a pattern with look-around, back-references or word boundaries, which no automaton
        supports.
        """
        return self._lenient and _UNSUPPORTED_PATTERN.search(pattern.replace("\\\\", "")) is not None

    # References

    def _only_reference(self, schema: dict[str, Any]) -> Any:
        """Returns the target of a schema that has only ``$ref``, apart from annotations; None for any other schema."""
        while True:
            keywords = schema.keys() & (KEYWORDS | NEUTRAL.keys())
            inner = schema.get("allOf")
            if keywords == {"allOf"} and isinstance(inner, list) and len(inner) == 1 and isinstance(inner[0], dict):
                schema = inner[0]
            elif keywords == {"$ref"} and isinstance(schema["$ref"], str):
                return self._target(schema)
            else:
                return None

    def _target(self, schema: dict[str, Any]) -> Any:
        """Returns the schema that ``$ref`` names; None if it is outside of the document."""
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


def _is_neutral(part: Mapping[str, Any], keyword: str, value: Any) -> bool:
    """Returns True if a keyword of ``NEUTRAL`` has no effect: by its value, or because the keyword that it depends on
    is missing.
    """
    return value in NEUTRAL[keyword] or _DEPENDENT.get(keyword, keyword) not in part


def _names_as_properties(part: dict[str, Any]) -> dict[str, Any]:
    """Rewrites a schema of maps with ``propertyNames`` to an equivalent one with ``patternProperties`` or
    ``properties``.

    It does so if ``propertyNames`` is a pattern or a list of names; other schemas are returned unchanged.
    """
    names = part.get("propertyNames")
    if not isinstance(names, dict) or part.keys() & {"properties", "patternProperties"}:
        return part
    held = names.keys() & (KEYWORDS | NEUTRAL.keys()) - {"type"}
    if names.get("type", "string") != "string" or len(held) != 1:
        return part
    value = part.get("additionalProperties", part.get("unevaluatedProperties", True))
    result = {k: one for k, one in part.items() if k not in ("propertyNames", "unevaluatedProperties")}
    if held == {"pattern"} and isinstance(names["pattern"], str):
        return {**result, "patternProperties": {names["pattern"]: value}, "additionalProperties": False}
    if held == {"enum"} and is_names(names["enum"]):
        return {**result, "properties": dict.fromkeys(names["enum"], value), "additionalProperties": False}
    return part
