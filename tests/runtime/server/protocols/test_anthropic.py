"""Anthropic's messages, with its client: blocks, tools, reasoning, streams, errors, and the line that changes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from enginewright.runtime.server.protocols.anthropic import LEFT_OUT_HEADER, MessagesBody
from tests.runtime.server.conftest import Reply, Server

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "input_schema": CITY | {"additionalProperties": False}}
ASKED: Any = [{"role": "user", "content": "Go"}]
PATH = "/v1/messages"
BASE = {"messages": ASKED, "max_tokens": 200, "model": "tools"}
NOT_OPTIONS = {"extra_headers", "extra_query", "extra_body", "timeout"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=%s;"


@pytest.fixture(scope="module")
def client(agents: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=agents.url, api_key="none", max_retries=0) as connected:
        yield connected


def named_events(reply: Reply) -> list[tuple[str, Any]]:
    """A stream's, with their names."""
    names = re.findall(rb"^event: (\w+)$", reply.body, re.M)
    assert len(names) == len(reply.events)
    return [(name.decode(), one) for name, one in zip(names, reply.events, strict=True)]


def order(reply: Reply) -> str:
    """The order of a stream's events, repeated ones once."""
    short = {"message_start": "M", "ping": "p", "content_block_start": "<", "content_block_delta": "d"}
    short |= {"content_block_stop": ">", "message_delta": "m", "message_stop": "."}
    return re.sub("d+", "d", "".join(short[name] for name, _ in named_events(reply)))


def without_ids(blocks: list[Any]) -> list[Any]:
    return [{k: v for k, v in block.model_dump(exclude_none=True).items() if k != "id"} for block in blocks]


def both(client: anthropic.Anthropic, **body: Any) -> Any:
    """The message that comes whole, which is the one that is streamed."""
    extra = {"seed": 1}
    body = {"model": "tools", "messages": ASKED, "max_tokens": 200, "extra_body": extra, **body}
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        message = stream.get_final_message()
    assert without_ids(message.content) == without_ids(whole.content)
    assert (message.stop_reason, message.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert message.usage.output_tokens == whole.usage.output_tokens
    return whole


def test_a_text(client: anthropic.Anthropic) -> None:
    answers = both(client, max_tokens=8)
    (block,) = answers.content
    assert answers.id.startswith("msg_") and block.type == "text" and block.text
    assert answers.stop_reason == "max_tokens" and answers.usage.output_tokens == 8 and answers.usage.input_tokens > 0
    stop = block.text[3]
    cut = both(client, max_tokens=8, stop_sequences=[stop])
    assert cut.stop_reason == "stop_sequence" and cut.stop_sequence == stop
    assert "".join(one.text for one in cut.content) == block.text[: block.text.index(stop)]


def test_calls(client: anthropic.Anthropic, agents: Server) -> None:
    answers = both(client, tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    (call,) = answers.content
    assert answers.stop_reason == "tool_use" and call.id.startswith("toolu_")
    assert call.name == "weather" and call.input["city"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sun"}]}
    messages = [*ASKED, {"role": "assistant", "content": answers.content}, {"role": "user", "content": [result]}]
    again = client.messages.create(model="tools", messages=messages, tools=[WEATHER], max_tokens=1)
    # The call went back as the tokens that it was: all full blocks of the conversation so far are there.
    total = answers.usage.input_tokens + answers.usage.cache_read_input_tokens + answers.usage.output_tokens
    assert again.usage.cache_read_input_tokens > 0.8 * total
    assert again.usage.cache_read_input_tokens + again.usage.input_tokens > total


def test_reasoning(client: anthropic.Anthropic) -> None:
    counted = {}
    for kind in ("disabled", "enabled", "adaptive"):
        thinking = {"type": kind} | ({"budget_tokens": 1024} if kind == "enabled" else {})
        counted[kind] = client.messages.count_tokens(model="thinking", messages=ASKED, thinking=thinking).input_tokens  # type: ignore[arg-type]
    plain = client.messages.count_tokens(model="thinking", messages=ASKED).input_tokens
    assert plain == counted["disabled"] > counted["enabled"] == counted["adaptive"]
    turn = [{"type": "thinking", "thinking": "ab", "signature": ""}, {"type": "text", "text": "x"}]
    messages = [*ASKED, {"role": "assistant", "content": turn}, *ASKED]
    longer = client.messages.count_tokens(model="thinking", messages=messages).input_tokens
    turn = [{"type": "text", "text": "x"}]
    shorter = client.messages.count_tokens(
        model="thinking", messages=[*ASKED, {"role": "assistant", "content": turn}, *ASKED]
    ).input_tokens
    assert longer == shorter + len("<think>\nab\n</think>\n\n")


def test_the_form_of_an_answer(client: anthropic.Anthropic) -> None:
    form = {"format": {"type": "json_schema", "schema": {"enum": ["a", "b"]}}}
    (block,) = both(client, output_config=form).content
    assert block.text.strip() in ('"a"', '"b"')


def test_the_order_of_events(agents: Server) -> None:
    stream = BASE | {"stream": True, "seed": 1}
    text = agents.ask("POST", PATH, stream | {"max_tokens": 5})
    assert text.headers["content-type"].startswith("text/event-stream") and order(text) == "Mp<d>m."
    for name, one in named_events(text):
        assert one["type"] == name
    calls = agents.ask("POST", PATH, stream | {"tools": [WEATHER], "tool_choice": {"type": "any"}})
    assert re.fullmatch(r"Mp(<d>)+m\.", order(calls))
    assert named_events(calls)[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_an_assistant_s_last_message_is_continued(client: anthropic.Anthropic) -> None:
    begun: Any = [*ASKED, {"role": "assistant", "content": "Once upon"}]
    longer = client.messages.count_tokens(model="tools", messages=begun).input_tokens
    assert longer == client.messages.count_tokens(model="tools", messages=ASKED).input_tokens + len("Once upon")


def test_a_line_that_changes_is_left_out(agents: Server) -> None:
    body = BASE | {"max_tokens": 1, "temperature": 0}
    text = {"type": "text", "text": "Be brief. " * 8, "cache_control": {"type": "ephemeral"}}
    plain = agents.ask("POST", PATH, body | {"system": [text]})
    assert LEFT_OUT_HEADER not in plain.headers
    counts = plain.json["usage"]
    for i, system in enumerate(
        (
            [{"type": "text", "text": BILLING % "1"}, text],
            [{"type": "text", "text": BILLING % "2"}, text],
            BILLING % "3" + "\n" + text["text"],  # type: ignore[operator]
        )
    ):
        reply = agents.ask("POST", PATH, body | {"system": system})
        assert reply.headers[LEFT_OUT_HEADER] == "x-anthropic-billing-header", i
        usage = reply.json["usage"]
        assert usage["cache_read_input_tokens"] > 0
        assert sum(usage[name] for name in ("input_tokens", "cache_read_input_tokens")) == sum(
            counts[name] for name in ("input_tokens", "cache_read_input_tokens")
        )
    for line in ("x-anthropic-billing-header: no", "Say: " + BILLING % "4"):
        reply = agents.ask("POST", PATH, body | {"system": line})
        assert LEFT_OUT_HEADER not in reply.headers


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_tokens": None}, "max_tokens: it is missing"),
        ({"odd": 1}, "'odd': there is no such field"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]: 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "odd": 1}]}]}, "no 'odd'"),
        ({"messages": [{"role": "odd", "content": "a"}]}, "messages[0]: its role is 'odd'"),
        ({"messages": [{"role": "user", "content": "a" * 2000}]}, "prompt is too long: "),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]: 'bash_20250124' isn't run for a client"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "odd"}}, "tool_choice: there is no tool 'odd'"),
        ({"tool_choice": {"type": "odd"}}, "tool_choice"),
        ({"thinking": {"type": "odd"}}, "thinking: 'odd' isn't a type"),
        ({"output_config": {"odd": 1}}, "output_config: there is no 'odd'"),
        ({"mcp_servers": [{"url": "http://a"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"stop_sequences": [""]}, "stop"),
    ],
)
def test_errors_have_anthropic_s_shape(agents: Server, more: dict[str, Any], said: str) -> None:
    for stream in (False, True):
        reply = agents.ask("POST", PATH, BASE | more | {"stream": stream})
        assert reply.status == 400, reply.body
        error = reply.json
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
        assert said in error["error"]["message"]
        assert error["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]


def test_errors_by_status(client: anthropic.Anthropic, agents: Server) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="odd", messages=ASKED, max_tokens=1)
    assert caught.value.type == "not_found_error"
    assert agents.ask("GET", PATH).json["error"]["type"] == "invalid_request_error"


def test_what_is_ignored_is_named(agents: Server) -> None:
    thinking = {"type": "enabled", "budget_tokens": 2000}
    more = {"metadata": {"user_id": "a"}, "thinking": thinking, "max_tokens": 1}
    reply = agents.ask("POST", PATH, BASE | more)
    assert reply.headers["x-enginewright-ignored"] == "metadata, thinking.budget_tokens, reasoning_effort"


def test_no_option_of_the_client_is_left_out(client: anthropic.Anthropic) -> None:
    known = {*MessagesBody.__struct_fields__, *MessagesBody.refused, *MessagesBody.harmless}
    for call in (client.messages.create, client.messages.stream, client.messages.count_tokens):
        assert {*inspect.signature(call).parameters} - NOT_OPTIONS <= known


def test_the_three_tables_are_apart() -> None:
    names = {*MessagesBody.__struct_fields__}
    assert not names & set(MessagesBody.refused) and not names & MessagesBody.harmless
    assert not set(MessagesBody.refused) & MessagesBody.harmless
