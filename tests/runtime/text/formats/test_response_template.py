"""A model's own ``response_template`` becomes a format; transformers reads the same out of answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.text.chat_format import FORMATS
from enginewright.runtime.text.formats.grammar import AnswerRules
from enginewright.runtime.text.formats.response_template import UnknownShapeError, converted, of_response_template
from enginewright.runtime.text.formats.table import PLAIN
from enginewright.runtime.text.tokenizer import Tokenizer
from tests.runtime.text.chat_streams import BY_NAME, TOOLS, byte_tokenizer, written

CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THINK = {"open": "<think>", "close": "</think>"}
TEMPLATES: dict[str, dict[str, Any]] = {
    "hermes": {
        "thinking": THINK,
        "tool_calls": {
            **{"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"},
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>"},
    },
    "qwen3-xml": {
        "reasoning_content": {"open_pattern": r"<think>\s*", "close_pattern": r"\s*</think>\s*"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            **{"close": "</tool_call>", "repeats": True, "content": "xml-inline"},
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": CALL,
        },
        "content": {},
    },
    "harmony": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>"},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            **{"close": "<|call|>", "repeats": True, "content": "json", "transform": CALL},
        },
    },
    "gemma4": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            **{"close": "<tool_call|>", "repeats": True, "content": "json", "transform": CALL},
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
    "deepseek-v3.1": {
        "thinking": THINK,
        "tool_calls": {
            "open_pattern": r"<｜tool▁call▁begin｜>(?P<name>\w+)<｜tool▁sep｜>",
            **{"close": "<｜tool▁call▁end｜>", "repeats": True, "content": "json", "transform": CALL},
        },
        "content": {},
    },
}
COMMAND = {
    "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
    "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
    "tool_calls": {
        **{"open": "<|START_ACTION|>", "close": "<|END_ACTION|>", "content": "json", "transform_each": True},
        "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
    },
}


def template(fields: dict[str, Any]) -> dict[str, Any]:
    return {"defaults": {"role": "assistant"}, "start_anchor": "<assistant>", "fields": fields}


def said(tokenizer: Tokenizer, text: str) -> tuple[Any, ...]:
    message = tokenizer.chat_format.parse(tokenizer, tokenizer.encode(text, add_special_tokens=False), tools=TOOLS)
    return message.content, message.reasoning, [(one.name, json.loads(one.arguments)) for one in message.calls]


def read_by_transformers(fields: dict[str, Any], text: str) -> tuple[Any, ...]:
    parsed = parse_response(text, template(fields), prefix="", tools=TOOLS)
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in parsed.get("tool_calls") or []]
    thought = parsed.get("thinking", parsed.get("reasoning_content"))
    return parsed.get("content"), thought, calls


def made(fields: dict[str, Any], markers: list[str]) -> Tokenizer:
    backend = byte_tokenizer(markers)
    special = {"eos_token": "<end>"}
    return Tokenizer(TokenizerFiles(backend.to_json(), "{{ messages }}", special, {}, json.dumps(template(fields))))


@pytest.mark.parametrize("name", ["hermes", "qwen3-xml", "gemma4"])
def test_what_transformers_reads_is_read(name: str) -> None:
    fields = TEMPLATES[name]
    tokenizer = made(fields, ["<tool_call>", "</tool_call>"] if name != "gemma4" else ["<|tool_call>", "<tool_call|>"])
    assert tokenizer.chat_format.has_calls and tokenizer.chat_format.has_reasoning
    calls = [("get_weather", {"city": "Zürich", "days": 3}), ("now", {})]
    for content, reasoning, called in (("Hello.", "Hm.", calls), (None, "Hm.", calls[:1]), ("Hello.", "Hm.", [])):
        text = written(name, content, reasoning, called)
        parsed = said(tokenizer, text)
        assert parsed == (content, reasoning, called)
        theirs = read_by_transformers(fields, text)
        assert parsed[1:] == theirs[1:]
        assert called or parsed == theirs  # theirs keeps the last text, were it the space between two calls


def test_a_list_of_calls_with_other_keys() -> None:
    markers = [f"<|{side}_{part}|>" for part in ("THINKING", "ACTION", "RESPONSE") for side in ("START", "END")]
    tokenizer = made(COMMAND, markers)
    text = "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    "
    text += '{"tool_call_id": "0", "tool_name": "now", "parameters": {}},\n    '
    text += '{"tool_call_id": "1", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}\n]<|END_ACTION|>'
    expected = (None, "Hm.", [("now", {}), ("get_weather", {"city": "Oslo"})])
    assert said(tokenizer, text) == read_by_transformers(COMMAND, text) == expected
    text = "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hello.<|END_RESPONSE|>"
    assert said(tokenizer, text) == read_by_transformers(COMMAND, text) == ("Hello.", "Hm.", [])
    grammar = tokenizer.chat_format.grammar(tokenizer, TOOLS, AnswerRules(choice="required"))
    assert grammar is not None and "tool_name" in grammar


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tables_entry_stays_where_both_say_the_same(name: str) -> None:
    """It says more: how a call is written, for grammars."""
    known = BY_NAME[name]
    table = converted(template(TEMPLATES[name]), known)
    assert table.name == name
    if name != "deepseek-v3.1":  # whose section of calls the template doesn't have
        assert table.calls == known.calls


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"tool_calls": {"open_pattern": "(?=x)", "close": "y", "content": "json"}}, "tool_calls.open_pattern"),
        ({"tool_calls": {"open": "x", "close": "y", "content": "kv-lines"}}, "tool_calls.content"),
        ({"tool_calls": {"open": "x", "content": "json"}}, "tool_calls.close"),
        ({"thinking": {"close": "y"}}, "thinking.open"),
        ({"images": {"open": "x"}}, "fields.images"),
        ({"tool_calls": {"open": "x", "close": "y", "content": "json", "transform": {"function": {}}}}, "transform"),
        (None, "no fields"),
    ],
)
def test_what_cannot_be_turned_is_named_and_leaves_the_table(fields: Any, key: str) -> None:
    with pytest.raises(UnknownShapeError, match=key):
        converted({"fields": fields}, PLAIN)
    assert of_response_template(json.dumps({"fields": fields}), PLAIN) is None
    assert of_response_template("{", FORMATS[0]) is None


def test_a_bundle_has_it() -> None:
    files = TokenizerFiles("{}", None, {}, {}, '{"fields": {}}\n')
    assert files.to_files()["tokenizer/response_template.json"] == b'{"fields": {}}\n'
    assert TokenizerFiles.from_files(files.to_files()) == files
    assert "tokenizer/response_template.json" not in TokenizerFiles("{}").to_files()
