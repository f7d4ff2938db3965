"""Tools, reasoning and forms of answers in chat completions: streamed equals unstreamed, and turns go on."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.server.engines.records import Piece
from enginewright.runtime.server.protocols.reading import Reader
from enginewright.runtime.server.protocols.tools import checked_messages, custom_input, tool_choice
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.text.chat_format import Delta
from tests.runtime.server.conftest import Reply, Server

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY | {"additionalProperties": False}}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": NOTHING}}
ASKED = [{"role": "user", "content": "Go"}]
SAYS = {"regex": "<think>\n(ab|cd)\n</think>\n\n(x|y)"}


def merged(reply: Reply) -> dict[str, Any]:
    """The message of a stream, put together as clients do."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": {}}
    for event in reply.events:
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                kind = "custom" if "custom" in call else "function"
                call_so_far = message["tool_calls"].setdefault(
                    call["index"], {"id": call.get("id"), "type": call.get("type")}
                )
                for name, value in call[kind].items():
                    call_so_far.setdefault(kind, {}).setdefault(name, "")
                    call_so_far[kind][name] += value
            message["finish_reason"] = choice["finish_reason"] or message.get("finish_reason")
    calls = [call for _, call in sorted(message.pop("tool_calls").items())]
    return message | ({"tool_calls": calls} if calls else {})


def both(server: Server, **body: Any) -> dict[str, Any]:
    """The message that comes whole and streamed, with its finish_reason and without ids."""
    body = {"messages": ASKED, "seed": 1, "max_tokens": 200, **body}
    reply = server.ask("POST", "/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    (choice,) = reply.json["choices"]
    whole = {k: v for k, v in choice["message"].items() if k != "refusal"} | {"finish_reason": choice["finish_reason"]}
    whole["content"] = whole["content"] or ""
    stream = merged(server.ask("POST", "/v1/chat/completions", body | {"stream": True}))
    for answer in (whole, stream):
        for call in answer.get("tool_calls", ()):
            assert call.pop("id").startswith("call_")
    assert stream == whole
    return whole


def test_a_call_that_is_required(agents: Server) -> None:
    # One call, as random weights may never end them.
    answers = both(agents, model="tools", tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False)
    assert answers["finish_reason"] == "tool_calls" and answers["content"] == ""
    assert len(answers["tool_calls"]) == 1
    for call in answers["tool_calls"]:
        assert call["type"] == "function" and call["function"]["name"] in ("weather", "clock")
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_a_call_of_the_tool_that_is_named(agents: Server) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    answers = both(agents, model="tools", tools=[CLOCK, WEATHER], tool_choice=named, parallel_tool_calls=False)
    (call,) = answers["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


def test_a_custom_tool_s_call_is_a_text(agents: Server) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(on|off){1,2}"}}
    tool = {"type": "custom", "custom": {"name": "switch", "format": grammar}}
    answers = both(agents, model="tools", tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = answers["tool_calls"]
    assert call["type"] == "custom" and call["custom"]["input"] in ("on", "off", "onon", "onoff", "offon", "offoff")


def test_without_tools_what_looks_like_a_call_is_text(agents: Server) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    answers = both(agents, model="tools", structured_outputs={"choice": [text]})
    assert answers == {"role": "assistant", "content": text, "finish_reason": "stop"}


def test_a_call_goes_back_as_its_own_tokens(agents: Server) -> None:
    body = {"model": "tools", "tools": [WEATHER], "seed": 3, "max_tokens": 200}
    first = agents.ask(
        "POST",
        "/v1/chat/completions",
        {"messages": ASKED, **body, "tool_choice": "required", "parallel_tool_calls": False},
    ).json
    message = first["choices"][0]["message"]
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sun"}
    again = agents.ask(
        "POST", "/v1/chat/completions", {"messages": [*ASKED, message, result], **body, "max_tokens": 1}
    ).json
    total = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert again["enginewright"]["spliced_tokens"] == total
    call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)  # the same as JSON
    again = agents.ask(
        "POST", "/v1/chat/completions", {"messages": [*ASKED, message, result], **body, "max_tokens": 1}
    ).json
    assert again["enginewright"]["spliced_tokens"] == total
    call["function"]["arguments"] = '{"city": "Bonn"}'
    again = agents.ask(
        "POST", "/v1/chat/completions", {"messages": [*ASKED, message, result], **body, "max_tokens": 1}
    ).json
    assert again["enginewright"]["spliced_tokens"] == 0


def test_reasoning_has_both_names_and_comes_back(agents: Server) -> None:
    answers = both(agents, model="thinking", structured_outputs=SAYS)
    assert answers["reasoning"] == answers["reasoning_content"] and answers["reasoning"] in ("ab", "cd")
    assert answers["content"] in ("x", "y") and answers["finish_reason"] == "stop"
    shown = both(agents, model="thinking", structured_outputs=SAYS, include_reasoning=False)
    assert shown == {name: answers[name] for name in ("role", "content", "finish_reason")}
    body = {"model": "thinking", "seed": 1, "max_tokens": 200, "structured_outputs": SAYS}
    first = agents.ask("POST", "/v1/chat/completions", {"messages": ASKED, **body}).json
    message = first["choices"][0]["message"]
    counts = first["usage"]
    assert 0 < counts["completion_tokens_details"]["reasoning_tokens"] < counts["completion_tokens"]
    for name, spliced in (("reasoning", True), ("reasoning_content", True), (None, False)):
        turn = {"role": "assistant", "content": message["content"]} | ({name: message[name]} if name else {})
        again = agents.ask("POST", "/v1/chat/completions", {"messages": [*ASKED, turn, *ASKED], **body}).json
        total = counts["prompt_tokens"] + counts["completion_tokens"]
        assert again["enginewright"]["spliced_tokens"] == (total if spliced else 0)


def test_how_much_a_model_reasons(agents: Server) -> None:
    body = {"model": "thinking", "messages": ASKED, "max_tokens": 1}
    tokens = {}
    for effort in (None, "none", "on", "low"):
        reply = agents.ask("POST", "/v1/chat/completions", body | {"reasoning_effort": effort})
        tokens[effort] = reply.json["usage"]["prompt_tokens"]
        assert "x-enginewright-ignored" not in reply.headers
    assert tokens["none"] > tokens["low"] == tokens["on"] == tokens[None]  # the reasoning is over already
    reply = agents.ask("POST", "/v1/chat/completions", body | {"model": "tools", "reasoning_effort": "low"})
    assert reply.headers["x-enginewright-ignored"] == "reasoning_effort"


@pytest.mark.matrix
def test_the_reasoning_ends_at_its_budget(reasoner: Server) -> None:
    """The model is random, and reasons to the end of the answer without a budget."""
    body = {"messages": ASKED, "max_tokens": 30, "ignore_eos": True}
    endless = reasoner.ask("POST", "/v1/chat/completions", body | {"seed": 1}).json
    assert endless["usage"]["completion_tokens_details"]["reasoning_tokens"] == 30
    assert not endless["choices"][0]["message"]["content"]
    for budget in (1, 8):
        limited = body | {"seed": 1, "thinking_token_budget": budget}
        reply = reasoner.ask("POST", "/v1/chat/completions", limited)
        assert "x-enginewright-ignored" not in reply.headers
        details = reply.json["usage"]["completion_tokens_details"]
        assert 0 < details["reasoning_tokens"] <= budget + 1, "with the token that ends it"
        answers = both(reasoner, **limited)
        assert answers["reasoning"] and answers["content"] and answers["finish_reason"] == "length"
        for other in (
            {"thinking": {"type": "enabled", "budget_tokens": budget}},
            {"reasoning": {"max_tokens": budget}},
        ):
            assert both(reasoner, **body, seed=1, **other) == answers


def test_a_schema_begins_behind_the_reasoning(agents: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1, 2]}}}
    answers = both(agents, model="thinking", reasoning_effort="none", response_format=form)
    assert json.loads(answers["content"]) in (1, 2)


def test_what_has_no_room_for_reasoning_says_so(agents: Server) -> None:
    begun = {"role": "assistant", "content": "<think>"}
    body = {"model": "thinking", "messages": [*ASKED, begun], "continue_final_message": True, "max_tokens": 4}
    reply = agents.ask("POST", "/v1/chat/completions", body | {"guided_choice": ["a"]})
    assert reply.status == 400 and "an answer that begins with reasoning" in reply.json["error"]["message"]
    answers = both(agents, **body)
    assert answers["content"] == "" and answers["reasoning"] and answers["finish_reason"] == "length"


def test_the_official_client_runs_a_tool_loop(agents: Server) -> None:
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [*ASKED]
        with client.chat.completions.stream(
            model="tools",
            messages=messages,
            tools=[WEATHER],
            tool_choice="required",
            max_tokens=200,
            seed=5,  # type: ignore[list-item]
        ) as stream:
            answer = stream.get_final_completion().choices[0].message
        assert answer.tool_calls
        messages += [answer.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in answer.tool_calls]
        last = client.chat.completions.create(model="tools", messages=messages, max_tokens=3)
        assert last.choices[0].message.content is not None


def test_tools_that_a_model_does_not_call_are_refused(server: Server) -> None:
    reply = server.chat("Hi", tools=[CLOCK])
    assert reply.status == 400 and reply.json["error"]["param"] == "tools"


class Script:
    """A parser that says what is written."""

    def __init__(self, deltas: list[Delta], reasoning: int = 0) -> None:
        self._deltas, self._left = deltas, reasoning

    @property
    def in_reasoning(self) -> bool:
        self._left -= 1
        return self._left >= 0

    def push(self, ids: tuple[int, ...]) -> list[Delta]:
        return [self._deltas.pop(0)] if self._deltas else []

    def finish(self) -> list[Delta]:
        return []

    class message:
        calls = ()


@pytest.mark.parametrize(("keep", "text"), [(False, "one "), (True, "one STOP")])
def test_a_stop_string_ends_what_a_parser_reads(keep: bool, text: str) -> None:
    deltas = [
        Delta(reasoning="r"),
        Delta(content="one S"),
        Delta(content="TO"),
        Delta(content="P two"),
        Delta(content="!"),
    ]
    reader = Reader(Script(deltas, 2), SamplingParams(stop="STOP", include_stop_str_in_output=keep))  # type: ignore[arg-type]
    news = [reader.push(Piece(0, 0, (1,), "")) for _ in range(4)] + [reader.push(Piece(0, 0, (1,), "", "stop"))]
    all_deltas = [delta for one in news for delta in one.deltas]
    assert "".join(one.content for one in all_deltas) == text and "".join(one.reasoning for one in all_deltas) == "r"
    assert reader.reasoning_tokens == 2


def test_a_custom_tool_s_input() -> None:
    assert custom_input('{"input": "a\\nb"}') == "a\nb"
    assert custom_input('{"input": "a') == '{"input": "a'
    deltas = [Delta(call=0, name="c", arguments='{"in'), Delta(call=0, arguments='put": "x"}'), Delta(content="y")]
    reader = Reader(Script(deltas), SamplingParams(), frozenset({"c"}), "call_")  # type: ignore[arg-type]
    pushed = [delta for _ in range(3) for delta in reader.push(Piece(0, 0, (1,), "")).deltas]
    assert [(one.name, one.arguments, one.content) for one in pushed] == [("c", "x", ""), (None, "", "y")]


def test_messages_as_templates_read_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    custom = {"id": "c2", "type": "custom", "custom": {"name": "g", "input": "x"}}
    turn = {"role": "assistant", "tool_calls": [call, custom]}
    messages = checked_messages([turn, {"role": "tool", "tool_call_id": "c2", "content": "ok"}])
    first, second = messages[0]["tool_calls"]
    assert first["function"]["arguments"] == {"a": 1} and second["function"]["arguments"] == {"input": "x"}
    assert messages[1]["name"] == "g"
    with pytest.raises(RequestError, match="function_call is the older name"):
        checked_messages([{"role": "assistant", "function_call": {"name": "f"}}])


def test_which_tools_may_be_called() -> None:
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CLOCK]}}
    choice = tool_choice([WEATHER, CLOCK], only)
    assert [tool["function"]["name"] for tool in choice.tools] == ["clock"] and choice.mode == "required"
    assert tool_choice([WEATHER], "none").shown is None and not tool_choice([WEATHER]).strict
    flat = {"type": "function", "name": "f", "strict": True, "parameters": CITY}  # as Responses has them
    assert tool_choice([flat], {"type": "function", "name": "f"}).name == "f" and tool_choice([flat]).strict


LONG = {"max_tokens": 400, "stream": True, "model": "tools"}
STREAMS = {
    "/v1/chat/completions": {"messages": ASKED, "ignore_eos": True, **LONG},
    "/v1/messages": {"messages": ASKED, **LONG},
    "/v1/responses": {"input": "Go", "model": "tools", "stream": True, "max_output_tokens": 400},
    "/api/chat": {"messages": ASKED, "model": "tools", "options": {"num_predict": 400}},
}


@pytest.mark.parametrize("path", STREAMS)
def test_a_client_that_leaves_a_stream_frees_its_blocks(agents: Server, path: str) -> None:
    body = json.dumps(STREAMS[path]).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    with agents.connect() as link:
        link.sendall(head.encode() + body)
        assert link.recv(100).startswith(b"HTTP/1.1 200")
    agents.wait(lambda: agents.props("tools")["requests"] == 0 and agents.props("tools")["kv_cache_used"] == 0)
