"""Schemas as answers are held to them: what is closed, what stays open, what is left out, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from enginewright.runtime.shared import json_schema
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.json_document import JSON_WHITESPACE
from enginewright.runtime.shared.json_schema import hold_schema
from enginewright.runtime.shared.json_schema_keywords import ENFORCED_FORMATS, KEYWORDS, NEUTRAL
from tests.runtime.requests.byte_tokens import byte_tokens_json

from .closed_schemas import CLOSED, DEAD, DIGIT, ENDLESS, OPEN, TEXT, thing, validator

END = 2
OPTIONS: dict[str, Any] = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": JSON_WHITESPACE}


@pytest.fixture(scope="module")
def tokens() -> LLTokenizer:
    return LLTokenizer(byte_tokens_json([END]), n_vocab=256, eos_token=[END])


def compiled(schema: Any, tokens: LLTokenizer) -> LLMatcher:
    source = LLMatcher.grammar_from_json_schema(json.dumps({} if schema is True else schema), overrides=OPTIONS)  # type: ignore[arg-type]
    return LLMatcher(tokens, source, log_level=0)


def answers(matcher: LLMatcher, seeds: int, most: int = 400) -> Iterator[str]:
    """Yields answers drawn evenly from what may come next, which have ended. Texts and numbers are kept short."""
    assert not matcher.get_error(), matcher.get_error()
    for seed in range(seeds):
        draw, at, text = random.Random(seed), matcher.deep_copy(), bytearray()
        while len(text) < most:
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(at.compute_bitmask(), np.uint8), bitorder="little"))
            assert not at.is_error() and len(allowed), (bytes(text), at.get_error())
            quick = [token for token in (END, *b'"}]') if token in allowed]
            token = draw.choice(quick if quick and draw.random() < 0.5 else allowed.tolist())
            if token == END:
                break
            assert at.consume_token(token), at.get_error()
            text.append(token)
            if at.is_stopped():
                assert at.is_accepting(), bytes(text)
                break
        else:
            continue
        yield text.decode()


@pytest.mark.parametrize("lenient", [True, False])
@pytest.mark.parametrize("name", CLOSED)
def test_only_declared_properties_are_allowed(tokens: LLTokenizer, name: str, lenient: bool) -> None:
    held = hold_schema(CLOSED[name], "x", lenient=lenient)
    expected = validator(CLOSED[name])
    count = 0
    for text in answers(compiled(held.schema, tokens), 6):
        expected.validate(json.loads(text))
        count += 1
    assert count >= 3


@pytest.mark.parametrize("name", CLOSED)
def test_a_held_schema_is_held_as_it_is(name: str) -> None:
    again = hold_schema(hold_schema(CLOSED[name], "x").schema, "x")
    assert not again.ignored
    jsonschema.Draft202012Validator.check_schema(again.schema)
    assert hold_schema(again.schema, "x").schema == again.schema


@pytest.mark.parametrize("name", OPEN)
def test_an_object_without_properties_or_that_says_so_stays_open(tokens: LLTokenizer, name: str) -> None:
    schema = OPEN[name]
    matcher = compiled(hold_schema(schema, "x").schema, tokens)
    value: dict[str, Any] = {"a": 1} if "a" in json.dumps(schema.get("properties", schema.get("allOf", ""))) else {}
    value = (
        {"meta": {"new": 1}} if name == "a free property" else value | {"new": "n" if TEXT in schema.values() else 1}
    )
    at = matcher.deep_copy()
    for byte in json.dumps(value, separators=(",", ":")).encode():
        assert at.consume_token(byte), value
    assert at.is_accepting()


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({**thing(a=DIGIT), "anyOf": [thing(b=DIGIT), thing(c=DIGIT)]}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}),
        ({**thing(a=DIGIT), "anyOf": [thing(b=DIGIT), True]}, {"a": 1}, {"a": 1, "c": 2}),
        ({**thing(a=DIGIT), "required": ["a", "b"]}, {"a": 1, "b": "any"}, {"a": 1, "b": 2, "c": 3}),
        ({"type": "object", "propertyNames": {"enum": ["p", "q"]}}, {"p": 1}, {"r": 1}),
        ({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, {"p": 1}, {"pp": 1}),
        ({"type": "object", "properties": {"a": DIGIT}, "maxProperties": 4}, {"a": 1}, {"b": 1}),
        ({**thing(a=DIGIT), "minProperties": 1}, {"a": 1}, {}),
        ({"minimum": 1, "exclusiveMinimum": True, "type": "integer"}, 2, 1),
        ({"type": "string", "maxLength": 2.0}, "ab", "abc"),
    ],
)
def test_what_a_schema_says_of_properties(tokens: LLTokenizer, schema: Any, right: Any, wrong: Any) -> None:
    for lenient in (True, False):
        held = hold_schema(schema, "x", lenient=lenient)
        assert not held.ignored
        for value, expected in ((right, True), (wrong, False)):
            at = compiled(held.schema, tokens)
            text = json.dumps(value, separators=(",", ":")).encode()
            assert (at.try_consume_tokens([*text]) == len(text) and at.is_accepting()) == expected, value


@pytest.mark.parametrize(
    ("schema", "ignored"),
    [
        ({"type": "array", "items": DIGIT, "uniqueItems": True, "maxItems": 3}, ("uniqueItems",)),
        ({"type": "array", "items": DIGIT, "contains": {"const": 3}, "minContains": 1}, ("contains", "minContains")),
        (thing(p={**TEXT, "format": "path"}), ("format",)),
        (thing(p={**TEXT, "format": "uri-reference"}), ("format",)),
        (thing(p={**TEXT, "pattern": "^(?!x)[a-z]$"}), ("pattern",)),
        ({"type": "object", "patternProperties": {"^(?!x)": DIGIT}}, ("patternProperties",)),
        ({**thing(k={"enum": ["x", "y"]}), "if": {}, "then": {"properties": {"w": DIGIT}}}, ("if", "then")),
        ({"type": "object", "properties": {"a": {**DIGIT, "required": True}}}, ("required",)),
        ({"not": {"type": "null"}, "type": "integer", "maximum": 3}, ("not",)),
        ({"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]}, ("oneOf",)),
        ({"oneOf": [thing(a=DIGIT, c=DIGIT), thing(a=DIGIT)]}, ("oneOf",)),
        ({"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "minProperties": 1}, ("minProperties",)),
        ({**thing(a=DIGIT), "dependentRequired": {"a": ["b"]}}, ("dependentRequired",)),
        ({"type": "file"}, ("type",)),
        ({**thing(a={"type": "string", "contentEncoding": "base64"}), "uniqueItems": False, "not": False}, ()),
    ],
)
def test_what_cannot_be_enforced_is_left_out_and_named(
    tokens: LLTokenizer, schema: Any, ignored: tuple[str, ...]
) -> None:
    held = hold_schema(schema, "x")
    assert held.ignored == ignored
    assert list(answers(compiled(held.schema, tokens), 3))


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_that_needs_itself_is_refused(name: str) -> None:
    for lenient in (True, False):
        with pytest.raises(RequestError, match=r"^the field: nothing can meet it"):
            hold_schema(ENDLESS[name], "the field", lenient=lenient)


def test_an_optional_property_that_needs_itself_never_comes(tokens: LLTokenizer) -> None:
    endless = ENDLESS["a list that needs itself"]
    schema = {"$defs": endless["$defs"], **thing(a=DIGIT)}
    schema["properties"] = {"a": DIGIT, "n": {"$ref": "#/$defs/n"}}
    for text in answers(compiled(hold_schema(schema, "x").schema, tokens), 10):
        assert json.loads(text).keys() == {"a"}


@pytest.mark.parametrize("name", DEAD)
def test_a_dead_end_is_known_before_a_request_runs(tokens: LLTokenizer, name: str) -> None:
    try:
        held = hold_schema(DEAD[name], "x")
    except RequestError as e:
        assert e.message == "x: nothing can meet it"  # noqa: PT017  the compiler finds out the others
        return
    assert not held.ignored and "nsatisfiable" in compiled(held.schema, tokens).get_error()


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (3, "3 isn't a JSON schema"),
        ({"$ref": "#/$defs/nowhere"}, "'#/\\$defs/nowhere' leads nowhere"),
        ({"$ref": "#/$defs"}, None),
        ({"properties": {"a": {"$ref": "#/properties/b"}}}, "leads nowhere"),
    ],
)
def test_errors_name_the_field(schema: Any, said: str | None) -> None:
    if said is None:
        hold_schema({**schema, "$defs": {}}, "x")
        return
    with pytest.raises(RequestError, match=f"^the field: .*{said}"):
        hold_schema(schema, "the field")


def test_what_merging_costs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    double = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(40)}
    with pytest.raises(RequestError, match="x: merged it has more than"):
        hold_schema({"$defs": {**double, "d40": thing(a=DIGIT)}, "$ref": "#/$defs/d0"}, "x")
    deep = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}], "minLength": 1} for i in range(2000)}
    with pytest.raises(RequestError, match="x: with its references it is more than 100 levels deep"):
        hold_schema({"$defs": {**deep, "d2000": TEXT}, "$ref": "#/$defs/d0"}, "x")
    chain = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(2000)}
    with pytest.raises(RequestError, match="x: with its references it is more than 100 levels deep"):
        hold_schema({"$defs": {**chain, "d2000": TEXT}, **thing(a=TEXT), "anyOf": [{"$ref": "#/$defs/d0"}]}, "x")
    linked = {f"d{i}": thing(a={"$ref": f"#/$defs/d{i + 1}"}) for i in range(3000)}
    held = hold_schema({"$defs": {**linked, "d3000": TEXT}, "$ref": "#/$defs/d0"}, "x").schema
    assert isinstance(held, dict) and len(held["$defs"]) == 3001
    monkeypatch.setattr(json_schema, "MOST_NODES", 100)
    with pytest.raises(RequestError, match="more than 100 keywords and names"):
        hold_schema(thing(**{f"a{i}": DIGIT for i in range(50)}), "x")


def test_the_compiler_knows_what_is_kept(tokens: LLTokenizer) -> None:
    """The tables say what llguidance can do: a newer one may do more."""
    for name in ENFORCED_FORMATS:
        assert not compiled({"type": "string", "format": name}, tokens).get_error()
    for keyword in NEUTRAL:
        value = {"$dynamicRef": "#", "$recursiveRef": "#"}.get(keyword, {} if keyword != "uniqueItems" else True)
        error = compiled({keyword: value}, tokens).get_error()
        assert "Unimplemented" in error, (keyword, error, llguidance.__version__)
    assert not KEYWORDS & NEUTRAL.keys()
