"""Reasoning and calls are taken out of token ids, whatever is pushed at a time."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from enginewright.runtime.text.chat_format import FORMATS, ChatFormat, ChatParser, Delta, Message
from enginewright.runtime.text.formats.table import PLAIN, REASONING
from enginewright.runtime.text.tokenizer import Tokenizer
from tests.runtime.text.chat_streams import (
    MARKERS,
    TOOLS,
    Answer,
    answer,
    answers,
    byte_tokenizer,
    encoded,
    format_of,
    tokenizer_of,
)

TEMPLATES = Path(__file__).parent.parent / "chat_templates"
NAMES = [one.name for one in FORMATS]


def parser_of(name: str) -> ChatParser:
    return format_of(name).parser(tokenizer_of(name), tools=TOOLS)


def joined(deltas: Sequence[Delta]) -> tuple[str, str, dict[int, tuple[str | None, str]]]:
    """Joins deltas to content, reasoning and calls."""
    calls: dict[int, tuple[str | None, str]] = {}
    for delta in deltas:
        if delta.call is not None:
            name, arguments = calls.get(delta.call, (None, ""))
            assert name is None or delta.name is None
            calls[delta.call] = delta.name or name, arguments + delta.arguments
    return "".join(one.content for one in deltas), "".join(one.reasoning for one in deltas), calls


def pushed(parser: ChatParser, pieces: Sequence[Sequence[int]]) -> Message:
    """The message, which the pieces together are."""
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    content, reasoning, calls = joined(deltas)
    message = parser.message
    assert (content or None, reasoning or None) == (message.content, message.reasoning)
    assert list(calls) == list(range(len(message.calls)))
    assert [*calls.values()] == [(one.name, one.arguments) for one in message.calls]
    return message


def every_cut(one: Answer) -> None:
    """Asserts that what was written is read, for every cut in two, token by token, and for cuts at random."""
    ids = one.ids
    whole = pushed(parser_of(one.name), [ids])
    one.check(whole)
    for cut in range(1, len(ids)):
        assert pushed(parser_of(one.name), [ids[:cut], ids[cut:]]) == whole, cut
    assert pushed(parser_of(one.name), [[token] for token in ids]) == whole
    draw = random.Random(len(ids))
    for _ in range(5):
        places = sorted(draw.sample(range(len(ids) + 1), min(len(ids), 8)))
        assert (
            pushed(parser_of(one.name), [ids[a:b] for a, b in zip([0, *places], [*places, len(ids)], strict=True)])
            == whole
        )


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_of_a_stream_gives_the_same(name: str) -> None:
    for one in answers(name, 20):
        every_cut(one)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_every_cut_of_many_streams_gives_the_same(name: str) -> None:
    for one in answers(name, 200, seed=1):
        every_cut(one)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_may_break_off_anywhere(name: str) -> None:
    """It says so, and what is there is the beginning of what would have come."""
    calls = [
        ("get_weather", {"city": "Zürich", "days": 3}),
        ("set_alarm", {"at": {"hour": 7, "minute": 5}, "repeat": True}),
    ]
    thinks = format_of(name).has_reasoning
    one = answer(
        name,
        None if name.startswith("llama") else "Well.",
        "Hm." if thinks else None,
        calls[: 1 if name == "harmony" else 2],
    )
    whole = pushed(parser_of(name), [one.ids])
    one.check(whole)
    for end in range(len(one.ids)):
        cut = pushed(parser_of(name), [one.ids[:end]])
        thought = (cut.reasoning or "").rstrip("\ufffd \n")
        text = (cut.content or "").rstrip("\ufffd \n")
        so_far = tokenizer_of(name).decode(one.ids[:end], skip_special_tokens=False)
        # What nothing tells from text yet stands there: the beginning of a marker that isn't a token.
        assert (whole.content or "").startswith(text) or so_far.strip().endswith(text)
        assert (whole.reasoning or "").startswith(thought) or so_far.strip().endswith(thought)
        assert not any(marker in text for marker in MARKERS[name])
        for known, call in zip(whole.calls, cut.calls, strict=False):
            assert call.name == known.name
            assert known.arguments.startswith(call.arguments.rstrip("\ufffd"))
            assert not call.complete or call.arguments == known.arguments
        if cut.calls and not cut.calls[-1].complete:
            assert not cut.complete


@pytest.mark.parametrize("name", [name for name in NAMES if format_of(name).has_reasoning and name != "harmony"])
def test_reasoning_that_never_ends_is_reasoning(name: str) -> None:
    begin = format_of(name).spelling.reasoning.begin  # type: ignore[union-attr]
    deltas = pushed(parser_of(name), [encoded(name, f"{begin}I wonder, and wonder")])
    assert deltas == Message(None, "I wonder, and wonder", (), complete=False)
    opened = format_of(name).parser(tokenizer_of(name), reasoning_open=True)
    assert pushed(opened, [encoded(name, "still at it")]) == Message(None, "still at it", (), complete=False)


def test_the_prompt_may_have_begun_the_reasoning() -> None:
    tokenizer, hermes = tokenizer_of("hermes"), format_of("hermes")
    prompt = tokenizer.encode("<|im_start|>assistant\n<think>\n", add_special_tokens=False)
    ids = encoded("hermes", "Hm.\n</think>\n\nYes.")
    assert hermes.parse(tokenizer, ids, prompt_ids=prompt) == Message("Yes.", "Hm.")
    closed = tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False)
    assert hermes.parse(tokenizer, encoded("hermes", "Yes."), prompt_ids=closed) == Message("Yes.")
    assert not hermes.reasoning_open(tokenizer, tokenizer.encode("say <think> please </think> now"))


def test_reasoning_begun_in_ordinary_tokens() -> None:
    tokenizer = byte_tokenizer([])
    message = format_of("hermes").parse(
        tokenizer, list(b"Hm.\n</think>\n\nYes."), prompt_ids=list(b"assistant\n<think>\n")
    )
    assert message == Message("Yes.", "Hm.")


@pytest.mark.parametrize("name", ["hermes", "mistral", "kimi-k2", "deepseek-v3.1", "harmony"])
def test_a_marker_in_an_argument_is_text(name: str) -> None:
    """Spelled in ordinary tokens it never ends a call; and as a token it doesn't within a JSON string."""
    text = "write " + " ".join(MARKERS[name]) + " here"
    one = answer(name, None, None, [("get_weather", {"city": text})])
    every_cut(one)
    tokens = encoded(name, text)
    inside = next(i for i in range(len(one.ids)) if one.ids[i : i + len(tokens)] == tokens)
    ordinary = (*one.ids[:inside], *text.encode(), *one.ids[inside + len(tokens) :])
    every_cut(Answer(name, ordinary, None, None, one.calls))


def test_a_marker_spelled_in_ordinary_tokens_is_content() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert pushed(parser_of("hermes"), [list(text.encode())]) == Message(text)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("harmony", "gemma4", "mistral")])
def test_markers_that_are_no_tokens_are_read_as_text(name: str) -> None:
    tokenizer = byte_tokenizer([])
    for one in answers(name, 5, seed=2):
        ids = list(tokenizer_of(name).decode(one.ids, skip_special_tokens=False).encode())
        parser = format_of(name).parser(tokenizer, tools=TOOLS)
        one.check(pushed(parser, [[token] for token in ids]))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_are_no_text_become_replacement_characters(name: str) -> None:
    one = answer(name, None, None, [("get_weather", {"city": "a!b"})])
    at = one.ids.index(ord("!"))
    for bad, shown in ((b"\xff", "\ufffd"), (b"\xe6\x9d", "\ufffd"), ("東".encode(), "東")):
        ids = (*one.ids[:at], *bad, *one.ids[at + 1 :])
        deltas = pushed(parser_of(name), [[token] for token in ids])
        assert deltas == pushed(parser_of(name), [ids])
        assert json.loads(deltas.calls[0].arguments) == {"city": f"a{shown}b"}
    assert pushed(parser_of(name), [list("Zür".encode()[:2])]).content == "Z\ufffd"


def test_special_tokens_have_no_text_but_in_arguments() -> None:
    tokenizer = byte_tokenizer([*MARKERS["llama-json"], "<|start_header_id|>"])
    parse = format_of("llama-json").parse
    ids = tokenizer.encode('{"name": "now", "parameters": {"x": "a <|start_header_id|> b"}}<|eom_id|><end>')
    assert parse(tokenizer, ids, tools=TOOLS).calls[0].arguments == '{"x": "a <|start_header_id|> b"}'
    assert parse(tokenizer, tokenizer.encode("a<|start_header_id|>b<|eom_id|><end>")) == Message("ab")


@pytest.mark.parametrize("name", ["llama-json", "llama-pythonic"])
def test_without_markers_only_offered_tools_are_called(name: str) -> None:
    for text in (
        '{"name": "Ada", "parameters": {}}',
        '{"capital": "Paris"}',
        "{}",
        '{"a": 1} is a dict',
        "[1, 2]",
        "[f(x)]",
    ):
        assert pushed(parser_of(name), [[byte] for byte in text.encode()]) == Message(text)


def test_what_is_not_a_call_is_content() -> None:
    deltas = pushed(parser_of("hermes"), [encoded("hermes", "<tool_call>not JSON</tool_call> Sorry.")])
    assert deltas.calls == () and deltas.content == "<tool_call>not JSON</tool_call> Sorry."


def test_arguments_that_are_no_json_are_incomplete() -> None:
    deltas = pushed(
        parser_of("hermes"), [encoded("hermes", '<tool_call>{"name": "now", "arguments": {x: 1}}</tool_call>')]
    )
    assert [(one.name, one.complete) for one in deltas.calls] == [("now", False)] and not deltas.complete


@pytest.mark.parametrize("name", NAMES)
def test_values_nested_without_end_are_incomplete(name: str) -> None:
    """Nothing is raised: neither for those that are closed, nor for those that aren't."""
    one = answer(name, None, None, [("set_alarm", {"at": {"hour": 7}, "repeat": True})])
    ids = list(one.ids)
    seven = ids.index(ord("7"))
    for deep in (b"[" * 3000, b"[" * 3000 + b"]" * 3000, b'{"a":' * 2000, b"{a:" * 2000):
        deltas = pushed(parser_of(name), [[*ids[:seven], *deep, *ids[seven + 1 :]]])
        assert not any(call.complete and "[[[" in call.arguments and name == "gemma4" for call in deltas.calls)
        assert len(deltas.calls) <= 1


def test_arguments_may_come_before_the_name_and_as_text() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'
    text += '<tool_call>{"name": "g", "arguments": "{\\"b\\": 2}"}</tool_call>'
    deltas = pushed(parser_of("hermes"), [[token] for token in encoded("hermes", text)])
    assert [(one.name, one.arguments) for one in deltas.calls] == [("f", '{"a": 1}'), ("g", '{"b": 2}')]


def test_parameters_between_tags_get_the_types_of_the_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "on": {"type": "boolean"},
            "maybe": {"type": ["string", "null"]},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "deep": {"$ref": "#/$defs/deep"},
        },
        "$defs": {"deep": {"type": "object"}},
    }
    tools = [{"name": "f", "parameters": schema}]
    values = {
        "text": "007",
        "count": "7",
        "share": "1e3",
        "on": "True",
        "maybe": "null",
        "either": "x",
        "deep": "{'a': None}",
    }
    text = "<tool_call>\n<function=f>\n" + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    ids = encoded("qwen3-xml", f"{text}</function>\n</tool_call>")
    message = format_of("qwen3-xml").parse(tokenizer_of("qwen3-xml"), ids, tools=tools)
    assert json.loads(message.calls[0].arguments) == {
        **{"text": "007", "count": 7, "share": 1000.0, "on": True, "maybe": None, "either": "x", "deep": {"a": None}}
    }


def test_a_text_parameter_comes_piece_by_piece() -> None:
    parser = parser_of("qwen3-xml")
    ids = encoded("qwen3-xml", '<tool_call>\n<function=get_weather>\n<parameter=city>\nZ"b')
    pieces = [delta.arguments for token in ids for delta in parser.push([token]) if delta.arguments]
    assert "".join(pieces) == '{"city": "Z\\"b' and pieces[-3:] == ["Z", '\\"', "b"]


def test_plain_answers_are_their_text() -> None:
    tokenizer = byte_tokenizer([])
    text = "  <think>Hi</think> {x}\n\n"
    parser = ChatFormat(PLAIN).parser(tokenizer)
    assert pushed(parser, [[byte] for byte in text.encode()]) == Message(text)
    assert ChatFormat(REASONING).parse(tokenizer, list(text.encode())) == Message("{x}\n\n", "Hi")


def call_template(body: str, words: str = "") -> str:
    """A chat template that writes calls so; ``f`` is the call's function."""
    return (
        f"{{# {words} #}}{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content or '' }}}}"
        "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + body + "{% endfor %}{% endfor %}"
        "{% if tools %}{{ tools | length }}{% endif %}<assistant>"
    )


JSON = "{{ f.arguments | tojson }}"
CALLS = {
    "hermes": '<tool_call>\n{"name": "{{ f.name }}", "arguments": ' + JSON + "}\n</tool_call>",
    "qwen3-xml": "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "harmony": "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>" + JSON + "<|call|>",
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n"
    + JSON
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>"
    + JSON
    + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-dsml": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ f.name }}">\n</｜DSML｜invoke>',
    "deepseek-v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{{ f.name }}">\n</｜DSML｜invoke>',
    "deepseek-v4.1": '<｜DSML｜ calls>\n<｜DSML｜ invoke name="{{ f.name }}">\n</｜DSML｜ invoke>',
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}{{ f.name }}<|tool_call_argument_begin|>"
    + JSON,
    "glm-4.5": "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v }}</arg_value>\n{% endfor %}</tool_call>",
    "glm-4.7": "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
    "{{ v }}</arg_value>{% endfor %}</tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n</invoke>\n</minimax:tool_call>',
    "gemma4": '<|tool_call>call:{{ f.name }}{city:<|"|>Paris<|"|>}<tool_call|>',
    "mistral": "[TOOL_CALLS]{{ f.name }}[ARGS]" + JSON,
    "mistral-v3": '[TOOL_CALLS] [{"name": "{{ f.name }}", "arguments": ' + JSON + "}]",
    "llama-pythonic": "[{{ f.name }}(city='Paris')]",
    "llama-json": '{"name": "{{ f.name }}", "parameters": ' + JSON + "}",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_format_is_what_the_template_writes(name: str) -> None:
    assert byte_tokenizer([], template=call_template(CALLS[name])).chat_format.name == name
    other = byte_tokenizer([], template=call_template("f: {{ f.name }}"))
    assert other.chat_format.name == "plain"
    assert other.chat_format_of(call_template(CALLS[name])).name == name


@pytest.mark.parametrize(
    ("file", "name"),
    [
        *(("qwen25", "hermes"), ("qwen3", "hermes"), ("mistral", "mistral-v3"), ("llama3", "llama-json")),
        *(("harmony", "harmony"), ("deepseek_r1", "deepseek-v3"), ("smollm3", "reasoning"), ("smollm2", "plain")),
    ],
)
def test_formats_of_known_templates(file: str, name: str) -> None:
    template = (TEMPLATES / f"{file}.jinja").read_text(encoding="utf-8")
    chat_format = byte_tokenizer([], template=template).chat_format
    assert chat_format.name == name
    assert chat_format.has_reasoning == (file in ("qwen3", "harmony", "deepseek_r1", "smollm3"))


def test_without_a_template_answers_are_text() -> None:
    assert byte_tokenizer([]).chat_format == ChatFormat(PLAIN)


def test_no_stop_begins_another() -> None:
    """A parser that waits for one of two texts must not have to guess which it is."""
    for name in NAMES:
        tokenizer: Tokenizer = tokenizer_of(name)
        assert len(set(MARKERS[name])) == len(MARKERS[name])
        assert all(marker in tokenizer.added_tokens for marker in MARKERS[name])
