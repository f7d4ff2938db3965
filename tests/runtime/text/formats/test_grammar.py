"""The grammars in llguidance accept what models write, and every accepted answer has calls that validate."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.text.chat_format import FORMATS, ChatFormat
from enginewright.runtime.text.formats.gemma_call import GemmaCall
from enginewright.runtime.text.formats.grammar import AnswerRules
from enginewright.runtime.text.formats.python_call import PythonCall
from enginewright.runtime.text.formats.table import PLAIN, REASONING
from tests.runtime.shared.closed_schemas import DIGIT, thing
from tests.runtime.text.chat_streams import (
    TOOLS,
    answer,
    answers,
    byte_tokenizer,
    encoded,
    format_of,
    tokenizer_of,
    written,
)

NAMES = [one.name for one in FORMATS]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@cache
def tokens_of(name: str) -> LLTokenizer:
    tokenizer = tokenizer_of(name)
    return LLTokenizer(tokenizer.to_json(), eos_token=[tokenizer.added_tokens["<end>"]])


def matcher(name: str, grammar: str | None) -> LLMatcher:
    assert grammar is not None
    llm_matcher = LLMatcher(tokens_of(name), LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not llm_matcher.is_error(), llm_matcher.get_error()
    return llm_matcher


def taken(start: LLMatcher, ids: Sequence[int]) -> int:
    """The number of accepted tokens, plus one if the answer may end after them all."""
    at = start.deep_copy()
    count = at.try_consume_tokens(list(ids))
    assert not at.is_error(), at.get_error()
    return count + (count == len(ids) and at.is_accepting())


def grammar(name: str, **options: Any) -> LLMatcher:
    return matcher(name, format_of(name).grammar(tokenizer_of(name), TOOLS, AnswerRules(**options)))


@pytest.mark.parametrize("name", NAMES)
def test_what_models_write_is_taken(name: str) -> None:
    auto, required = grammar(name, strict=True), grammar(name, choice="required")
    for one in answers(name, 30, seed=3):
        text = tokenizer_of(name).decode(one.ids, skip_special_tokens=False)
        assert taken(auto, one.ids) == len(one.ids) + 1, text
        if one.calls and (one.content is None or name == "harmony"):  # which says something before a call
            assert taken(required, one.ids) == len(one.ids) + 1, text
        else:
            assert taken(required, one.ids) <= len(one.ids), text


@pytest.mark.parametrize("name", NAMES)
def test_wrong_calls_are_refused(name: str) -> None:
    right = ("get_weather", {"city": "Oslo", "days": 3})
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("get_water", {"city": "Oslo"}),
        ("get_weather", {"town": "Oslo"}),
        ("get_weather", {"days": 3}),
        ("get_weather", {"city": "Oslo", "days": "three"}),
        ("get_weather", {"city": "Oslo", "unit": "k"}),
        ("set_alarm", {"at": {"hour": 7}, "repeat": True}),
        ("now", {"zone": "UTC"}),
    ]
    for choice, strict in (("auto", True), ("required", None), ("get_weather", None)):
        start = grammar(name, choice=choice, strict=strict)
        ids = answer(name, None, None, [right]).ids
        assert taken(start, ids) == len(ids) + 1
        for call in wrong:
            ids = answer(name, None, None, [call]).ids
            assert taken(start, ids) <= len(ids), (choice, call)
    named = grammar(name, choice="now")
    ids = answer(name, None, None, [right]).ids
    assert taken(named, ids) <= len(ids)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "harmony"])
def test_one_call_alone(name: str) -> None:
    calls = [("now", {}), ("get_weather", {"city": "Oslo"})]
    ids = answer(name, None, None, calls).ids
    assert taken(grammar(name, choice="required"), ids) == len(ids) + 1
    assert taken(grammar(name, choice="required", parallel=False), ids) <= len(ids)
    assert taken(grammar(name, strict=True, parallel=False), ids) <= len(ids)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "harmony"])
def test_a_named_tool_is_called_once(name: str) -> None:
    call = ("get_weather", {"city": "Oslo"})
    start = grammar(name, choice="get_weather")
    for calls, right in (([call], True), ([call, call], False), ([], False)):
        ids = answer(name, None if calls else "No.", None, calls).ids
        assert (taken(start, ids) == len(ids) + 1) == right, calls
    one = grammar(name, parallel=False)  # no tool is strict
    for calls, right in (([call], True), ([call, call], False), ([], True)):
        ids = answer(name, None if calls else "No.", None, calls).ids
        assert (taken(one, ids) == len(ids) + 1) == right, calls


def test_harmony_calls_once() -> None:
    call = ("get_weather", {"city": "Oslo"})
    ids = answer("harmony", None, None, [call]).ids
    for start in (grammar("harmony", choice="get_weather"), grammar("harmony", parallel=False)):
        assert taken(start, ids) == len(ids) + 1 and taken(start, [*ids, *ids]) <= len(ids) + 1


_OBJECTS = {
    "plain": thing(a=DIGIT),
    "reference": {"$defs": {"A": thing(a=DIGIT)}, "$ref": "#/$defs/A"},
    "allOf": {"allOf": [thing(a=DIGIT), {"type": "object", "properties": {"b": DIGIT}}]},
    "anyOf": {"type": "object", "properties": {"b": DIGIT}, "anyOf": [thing(a=DIGIT), thing(b=DIGIT)]},
    "what can't be enforced": {**thing(a={**DIGIT, "format": "path", "x-order": 1}), "not": {"required": ["c"]}},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schema", _OBJECTS)
def test_calls_have_declared_arguments_alone(name: str, schema: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": _OBJECTS[schema], "strict": True}}]
    ignored: set[str] = set()
    written_grammar = format_of(name).grammar(
        tokenizer_of(name), tools, AnswerRules(choice="required"), ignored=ignored
    )
    start = matcher(name, written_grammar)
    for arguments, right in (({"a": 1}, True), ({"a": 1, "c": 2}, False), ({"c": 2, "a": 1}, False)):
        ids = answer(name, None, None, [("f", arguments)]).ids
        assert (taken(start, ids) == len(ids) + 1) == right, arguments
    assert {"tools.format", "tools.not"} <= ignored if "enforced" in schema else not ignored & {"tools.format"}


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_or_a_call_with_references(name: str) -> None:
    node = {"type": "object", "properties": {"v": DIGIT, "n": {"$ref": "#/$defs/N"}}, "required": ["v"]}
    tools = [{"name": "f", "parameters": {"$defs": {"N": node}, **thing(a={"$ref": "#/$defs/N"})}}]
    schema = {"$defs": {"N": thing(x=DIGIT)}, "$ref": "#/$defs/N"}
    if isinstance(format_of(name).spelling.calls.call, (GemmaCall, PythonCall)):  # type: ignore[union-attr]
        tools = [{"name": "f", "parameters": thing(a=DIGIT)}]
        right, wrong = [("f", {"a": 1})], [("f", {"a": 1, "w": 1})]
    else:
        right, wrong = [("f", {"a": {"v": 1, "n": {"v": 2}}})], [("f", {"a": {"v": 1, "w": {"v": 2}}})]
    start = matcher(name, format_of(name).grammar(tokenizer_of(name), tools, AnswerRules(schema=schema)))
    for text, fits in (
        (written(name, '{"x": 1}', None, []), True),
        (written(name, '{"x": 1, "y": 1}', None, []), False),
        (written(name, None, None, right), True),
        (written(name, None, None, wrong), False),
    ):
        ids = encoded(name, text)
        assert (taken(start, ids) == len(ids) + 1) == fits, text


@pytest.mark.parametrize("name", ["hermes", "qwen3-xml", "gemma4", "llama-pythonic"])
def test_a_tool_that_nothing_can_call_is_refused(name: str) -> None:
    for schema in ({"enum": []}, False, {"anyOf": [{"enum": []}]}):
        tools = [{"name": "f", "parameters": thing(a=schema)}]
        with pytest.raises(RequestError, match="tools: f: nothing can meet it"):
            format_of(name).grammar(tokenizer_of(name), tools, AnswerRules(choice="required"))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_taken_are_calls_that_validate(name: str) -> None:
    """Answers with letters changed, left out and put in; most are refused, and the others say what they should."""
    draw = random.Random(name)
    required = grammar(name, choice="required")
    accepted = 0
    for one in answers(name, 40, seed=4):
        if not one.calls:
            continue
        called = answer(name, None, one.reasoning, one.calls)
        for _ in range(25):
            ids = list(called.ids)
            for _ in range(draw.choice([0, 1, 2])):
                at = draw.randrange(len(ids))
                ids[at : at + draw.choice([0, 1])] = draw.choice(([], [draw.choice(list(b'"\\{}[],:<>/ \nax0-'))]))
            if taken(required, ids) <= len(ids):
                continue
            accepted += 1
            message = format_of(name).parse(tokenizer_of(name), ids, tools=TOOLS)
            assert message.calls and message.complete and not (message.content or "").strip(), bytes(ids[:400])
            for call in message.calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert accepted > 50


@pytest.mark.parametrize("name", [name for name in NAMES if format_of(name).has_reasoning])
def test_a_schema_begins_behind_the_reasoning(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    start = matcher(name, format_of(name).grammar(tokenizer_of(name), None, AnswerRules(schema=schema)))
    for reasoning in ("Hm. {", None):
        right = encoded(name, written(name, '{"a": 1}', reasoning, []))
        assert taken(start, right) == len(right) + 1, reasoning
        wrong = encoded(name, written(name, "No.", reasoning, []))
        assert taken(start, wrong) <= len(wrong)
    opened = format_of(name).grammar(tokenizer_of(name), None, AnswerRules(schema=schema), reasoning_open=True)
    if name != "harmony":
        end = format_of(name).spelling.reasoning.end  # type: ignore[union-attr]
        ids = encoded(name, f'so{end}{{"a": 1}}')
        assert taken(matcher(name, opened), ids) == len(ids) + 1
        assert taken(matcher(name, opened), encoded(name, '{"a": 1}')) == len('{"a": 1}')


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_or_calls(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    start = grammar(name, schema=schema)
    for right in (written(name, '{"a": 1}', None, []), written(name, None, None, [("now", {})])):
        ids = encoded(name, right)
        assert taken(start, ids) == len(ids) + 1, right
    wrong = encoded(name, written(name, "No.", None, []))
    assert taken(start, wrong) <= len(wrong)


def test_nothing_is_held_where_nothing_asks_for_it() -> None:
    hermes, tokenizer = format_of("hermes"), tokenizer_of("hermes")
    assert hermes.grammar(tokenizer, TOOLS) is None
    assert hermes.grammar(tokenizer, TOOLS, AnswerRules(choice="none")) is None
    assert hermes.grammar(tokenizer, None) is None
    assert ChatFormat(PLAIN).grammar(tokenizer, None) is None
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    assert hermes.grammar(tokenizer, strict) is not None
    assert hermes.grammar(tokenizer, strict, AnswerRules(strict=False)) is None


def test_a_model_without_calls_can_hold_a_schema() -> None:
    tokenizer = byte_tokenizer([])
    lark = ChatFormat(REASONING).grammar(tokenizer, None, AnswerRules(schema={"type": "integer"}))
    start = LLMatcher(
        LLTokenizer(tokenizer.to_json(), eos_token=[tokenizer.added_tokens["<end>"]]),
        LLMatcher.grammar_from_lark(lark or ""),
    )
    for text in ("7", "<think>\nHm.</think>\n\n7", "\n<think>7</think>7"):
        assert taken(start, list(text.encode())) == len(text) + 1, text
    for text in ("<think>7", "x", "</think>7"):
        assert taken(start, list(text.encode())) <= len(text), text
    with pytest.raises(RequestError, match="no form of tool calls"):
        ChatFormat(PLAIN).grammar(tokenizer, TOOLS, AnswerRules(choice="required"))


@pytest.mark.parametrize("name", ["hermes", "qwen3-xml", "harmony", "gemma4", "llama-pythonic"])
def test_a_thousand_tools(name: str) -> None:
    tools = [{"name": f"tool_{i}", "parameters": {"type": "object", "properties": {}}} for i in range(1000)]
    tokenizer = tokenizer_of(name)
    start = matcher(name, format_of(name).grammar(tokenizer, tools, AnswerRules(choice="required")))
    ids = answer(name, None, None, [("tool_999", {})]).ids
    assert taken(start, ids) == len(ids) + 1
    ids = answer(name, None, None, [("tool_1000", {})]).ids
    assert taken(start, ids) <= len(ids)
    with pytest.raises(RequestError, match="1,025 are offered"):
        format_of(name).grammar(
            tokenizer, [*tools, *({"name": f"more_{i}"} for i in range(25))], AnswerRules(choice="required")
        )


def test_errors_name_the_tool() -> None:
    hermes, xml, python = format_of("hermes"), format_of("qwen3-xml"), format_of("llama-pythonic")
    tokenizer = tokenizer_of("hermes")
    for tools, choice, message in (
        ([{"name": "f"}, {"name": "f"}], "auto", r"tools\[1\]: there are two tools 'f'"),
        ([{"parameters": {}}], "auto", r"tools\[0\]: it has no name"),
        ([{"name": "f", "parameters": 3}], "auto", "tools: f: parameters isn't a JSON schema"),
        ([{"name": "f"}], "g", "there is no tool 'g'"),
        ([], "required", "required: no tools are offered"),
    ):
        with pytest.raises(RequestError, match=message):
            hermes.grammar(tokenizer, tools, AnswerRules(choice=choice))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="tools: 'a>b': such a name can't be written"):
        xml.grammar(tokenizer_of("qwen3-xml"), [{"name": "a>b"}], AnswerRules(choice="required"))
    assert hermes.grammar(tokenizer, [{"name": 'a>"b'}], AnswerRules(choice="required")) is not None
    with pytest.raises(RequestError, match="'1st': such a name can't be written"):
        python.grammar(tokenizer_of("llama-pythonic"), [{"name": "1st"}], AnswerRules(choice="required"))
    held = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}}}]
    with pytest.raises(RequestError, match="tools: f: minimum can't be held"):
        python.grammar(tokenizer_of("llama-pythonic"), held, AnswerRules(strict=True))
    with pytest.raises(RequestError, match="the parameter 'a b' can't be written"):
        spaced = [{"name": "f", "parameters": {"type": "object", "properties": {"a b": {}}}}]
        xml.grammar(tokenizer_of("qwen3-xml"), spaced, AnswerRules(choice="required"))


def test_text_parameters_hold_pattern_and_length() -> None:
    properties = {"code": {"type": "string", "pattern": "^[A-Z]{2}/\\d+$"}, "short": {"type": "string", "maxLength": 3}}
    tools = [{"name": "f", "parameters": {"type": "object", "properties": properties, "required": ["code"]}}]
    for name in ("qwen3-xml", "glm-4.7", "deepseek-dsml", "minimax-m2"):
        start = matcher(name, format_of(name).grammar(tokenizer_of(name), tools, AnswerRules(choice="required")))
        for arguments, right in (
            ({"code": "AB/12"}, True),
            ({"code": "AB/12", "short": "éèe"}, True),
            ({"code": "ab/12"}, False),
            ({"code": "AB/12", "short": "long"}, False),
        ):
            ids = answer(name, None, None, [("f", arguments)]).ids
            assert (taken(start, ids) == len(ids) + 1) == right, (name, arguments)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_reasoning_ends_at_its_budget(name: str, tools: Any) -> None:
    form, tokenizer = format_of(name), tokenizer_of(name)
    reasoning = form.spelling.reasoning
    tools = tools if form.has_calls else None
    if not form.limits_reasoning(tokenizer):
        if reasoning is None:
            assert (
                form.grammar(tokenizer, tools, AnswerRules(choice="auto" if tools else "none", reasoning_budget=4))
                is None
                or tools
            )
        else:
            with pytest.raises(RequestError, match="this model's reasoning can't be limited"):
                form.grammar(tokenizer, tools, AnswerRules(choice="auto" if tools else "none", reasoning_budget=4))
        return
    assert reasoning is not None
    options: dict[str, Any] = {"choice": "auto" if tools else "none", "reasoning_budget": 4}
    begin, end = (list(encoded(name, mark.strip())) for mark in (reasoning.begin, reasoning.end))
    text, b, e = list(encoded(name, "abcdefgh")), len(begin), len(end)
    opened = matcher(name, form.grammar(tokenizer, tools, AnswerRules(**options), reasoning_open=True))
    assert taken(opened, text) == 4 and taken(opened, [*text[:4], *end, *text]) == 13 + e
    assert taken(opened, [*text[:2], *end, *text]) == 11 + e and taken(opened, [*end, *text]) == 9 + e
    accent = encoded(name, "abc\u20ac")[:4]  # the budget ends within a character
    assert taken(opened, [*accent, *end, *text]) == 13 + e
    closed = matcher(name, form.grammar(tokenizer, tools, AnswerRules(**options), reasoning_open=False))
    assert taken(closed, [*begin, *text]) == 4 + b and taken(closed, [*begin, *text[:4], *end, *text]) == 13 + b + e
    assert taken(closed, text) == 9, "the reasoning may be missing"
    schema = {"type": "integer"}
    held = matcher(
        name,
        form.grammar(
            tokenizer, None, AnswerRules(choice="none", schema=schema, reasoning_budget=4), reasoning_open=True
        ),
    )
    assert taken(held, text) == 4 and taken(held, [*text[:4], *end, *encoded(name, "12")]) == 7 + e
    if tools:
        ids = answers(name, 1, 3)[0].ids
        free = matcher(
            name,
            form.grammar(tokenizer, tools, AnswerRules(choice="auto", reasoning_budget=100_000), reasoning_open=False),
        )
        assert taken(free, ids) >= len(ids)
