"""OpenAI's responses, with its client: items, events in their order, what is stored, cancelling, errors."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from enginewright.runtime.server.http.errors import ApiError
from enginewright.runtime.server.protocols.response_items import InputTokensBody, ResponsesBody, items_of, messages_of
from enginewright.runtime.server.protocols.responses import Stored, _Kept
from enginewright.runtime.shared.errors import RequestError
from tests.runtime.server.conftest import Reply, Server

PATH = "/v1/responses"
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": CITY | {"additionalProperties": False},
    "strict": True,
}
BASE = {"model": "tools", "input": "Go", "max_output_tokens": 200, "seed": 1}
NOT_OPTIONS = {"extra_headers", "extra_query", "extra_body", "timeout", "self"}


@pytest.fixture(scope="module")
def client(agents: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what is another one each time."""
    fields = {k: v for k, v in response.items() if k not in ("id", "created_at", "completed_at", "enginewright")}
    fields["output"] = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    fields["usage"] = {k: v for k, v in response["usage"].items() if k != "input_tokens_details"}
    return fields


def put_together(events: list[Any]) -> list[Any]:
    """The output of a stream, from its single events."""
    items: dict[int, Any] = {}
    for one in events:
        kind = one["type"].removeprefix("response.")
        if kind == "output_item.added":
            items[one["output_index"]] = one["item"]
        elif kind == "content_part.added":
            items[one["output_index"]]["content"].append(one["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            part = items[one["output_index"]]["content"][one["content_index"]]
            part["text"] += one["delta"]
            if "logprobs" in part:
                part["logprobs"] += one["logprobs"]
        elif kind in ("function_call_arguments.delta", "custom_tool_call_input.delta"):
            item = items[one["output_index"]]
            item["arguments" if "arguments" in kind else "input"] += one["delta"]
        elif kind == "output_item.done":
            items[one["output_index"]]["status"] = one["item"]["status"]
            assert items[one["output_index"]] == one["item"]
    return [item for _, item in sorted(items.items())]


def both(server: Server, **body: Any) -> dict[str, Any]:
    """The response that comes whole, which is the one that is streamed."""
    body = {**BASE, **body}
    whole = server.ask("POST", PATH, body)
    assert whole.status == 200, whole.body
    reply = server.ask("POST", PATH, body | {"stream": True})
    events = reply.events
    assert [one["sequence_number"] for one in events] == [*range(len(events))]
    assert re.findall(rb"^event: (.*)$", reply.body, re.M) == [one["type"].encode() for one in events]
    assert [one["type"] for one in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert put_together(events) == last["response"]["output"]
    assert plain(last["response"]) == plain(whole.json)
    return whole.json


def order(reply: Reply) -> list[str]:
    """The order of a stream's events, repeated ones once."""
    names = [one["type"].removeprefix("response.") for one in reply.events]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def test_a_text(agents: Server) -> None:
    answers = both(agents, max_output_tokens=8)
    (item,) = answers["output"]
    assert item["role"] == "assistant" and item["content"][0]["text"]
    assert answers["status"] == item["status"] == "incomplete"
    assert answers["incomplete_details"] == {"reason": "max_output_tokens"} and answers["usage"]["output_tokens"] == 8


def test_the_order_of_events(agents: Server) -> None:
    text = agents.ask("POST", PATH, BASE | {"max_output_tokens": 5, "stream": True})
    assert order(text) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    one = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "stream": True}
    assert order(agents.ask("POST", PATH, BASE | one)) == [
        *("created", "in_progress", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]


def test_calls_and_the_responses_behind_them(agents: Server) -> None:
    options = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False}
    first = both(agents, **options)
    (call,) = first["output"]
    assert call["type"] == "function_call" and json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    body = {**BASE, "tools": [WEATHER], "max_output_tokens": 1, "input": [result], "previous_response_id": first["id"]}
    second = agents.ask("POST", PATH, body)
    assert second.status == 200, second.body
    usage = first["usage"]
    assert second.json["enginewright"]["spliced_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    by_hand = [{"role": "user", "content": "Go"}, call, result]
    third = agents.ask("POST", PATH, BASE | {"tools": [WEATHER], "max_output_tokens": 1, "input": by_hand}).json
    assert third["usage"]["input_tokens"] == second.json["usage"]["input_tokens"]
    items = agents.ask("GET", f"{PATH}/{second.json['id']}/input_items?order=asc").json
    assert [item["type"] for item in items["data"]] == ["message", "function_call", "function_call_output"]
    page = agents.ask("GET", f"{PATH}/{second.json['id']}/input_items?limit=2").json
    assert page["has_more"] and [item["type"] for item in page["data"]] == ["function_call_output", "function_call"]
    rest = agents.ask("GET", f"{PATH}/{second.json['id']}/input_items?after={page['last_id']}").json
    assert [item["type"] for item in rest["data"]] == ["message"] and not rest["has_more"]


def test_a_custom_tool(agents: Server) -> None:
    tool = {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "regex", "definition": "on|off"}}
    answers = both(agents, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = answers["output"]
    assert call["type"] == "custom_tool_call" and call["input"] in ("on", "off")
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
    again = agents.ask("POST", PATH, BASE | {"tools": [tool], "input": [result], "previous_response_id": answers["id"]})
    assert again.status == 200, again.body


def test_the_form_of_an_answer(agents: Server) -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"enum": ["a", "b"]}}
    (item,) = both(agents, text={"format": form})["output"]
    assert item["content"][0]["text"].strip() in ('"a"', '"b"')
    assert (
        agents.ask("POST", PATH, BASE | {"text": {"verbosity": "low"}}).headers["x-enginewright-ignored"]
        == "text.verbosity"
    )


def test_log_probabilities(agents: Server) -> None:
    answers = both(agents, max_output_tokens=6, include=["message.output_text.logprobs"], top_logprobs=2)
    scores = answers["output"][0]["content"][0]["logprobs"]
    assert len(scores) == 6 and all(len(one["top_logprobs"]) == 2 and one["logprob"] <= 0 for one in scores)


def test_the_official_client(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="tools", input="Go", max_output_tokens=4, temperature=0, metadata={"a": "b"}, instructions="Be."
    )
    assert response.output_text and response.metadata == {"a": "b"}
    assert client.responses.retrieve(response.id).output == response.output
    (item,) = client.responses.input_items.list(response.id).data
    assert item.type == "message"
    with client.responses.stream(
        model="tools", input="Go", tools=[WEATHER], tool_choice="required", extra_body={"seed": 1}
    ) as stream:  # without a seed, random whitespace may fill the context
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output[0].type == "function_call"
    counted = client.responses.input_tokens.count(model="tools", input="Go", instructions="Be.")
    assert response.usage is not None and counted.input_tokens == response.usage.input_tokens
    client.responses.delete(response.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            ask(response.id)
    hidden = client.responses.create(model="tools", input="Go", max_output_tokens=1, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(hidden.id)


def test_no_option_of_the_client_is_left_out(client: openai.OpenAI) -> None:
    for call, kind in (
        (client.responses.create, ResponsesBody),
        (client.responses.input_tokens.count, InputTokensBody),
    ):
        known = {*kind.__struct_fields__, *kind.refused, *kind.harmless}
        assert {*inspect.signature(call).parameters} - NOT_OPTIONS <= known
        assert not {*kind.__struct_fields__} & (set(kind.refused) | kind.harmless)


def test_cancelling_frees_what_a_frozen_engine_holds(make_server: Callable[..., Server], tools_bundle: Path) -> None:
    server = make_server("--model", f"tools={tools_bundle}")
    (pid,) = server.engines()
    body = json.dumps(BASE | {"stream": True, "max_output_tokens": 400, "temperature": 1.0}).encode()
    link = server.connect()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    link.sendall(head.encode() + body)
    data = link.recv(65536)
    while b"output_text.delta" not in data and b"[DONE]" not in data:
        data += link.recv(65536)
    os.kill(pid, signal.SIGSTOP)
    name = re.search(rb'"id":"(resp_\w+)"', data)[1].decode()  # type: ignore[index]
    reply = server.ask("POST", f"{PATH}/{name}/cancel")
    while piece := link.recv(65536):  # the stream ends though the engine stands still
        data += piece
    link.close()
    os.kill(pid, signal.SIGCONT)
    if reply.status == 200:
        assert reply.json["status"] == "cancelled" and b'"status":"cancelled"' in data and b"[DONE]" in data
        assert server.ask("GET", f"{PATH}/{name}").json["status"] == "cancelled"
    else:  # it was done before the engine stood still
        assert "is done already" in reply.json["error"]["message"]
    assert server.ask("POST", f"{PATH}/{name}/cancel").status == 400
    server.wait(lambda: server.props()["kv_cache_used"] == 0 and server.props()["requests"] == 0)


def test_a_websocket_is_told_to_ask_by_http(agents: Server) -> None:
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "eA==",
    }
    reply = agents.ask("GET", PATH, **headers)
    assert reply.status == 426 and reply.headers["upgrade"] == "HTTP/1.1"
    assert "server-sent events" in reply.json["error"]["message"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"odd": 1}, "'odd': there is no such field"),
        ({"input": None}, "input: it is missing"),
        ({"input": [{"type": "odd"}]}, "input[0]: 'odd' isn't a type of item"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]: "),
        ({"input": [{"role": "odd", "content": "a"}]}, "input[0]: its role is 'odd'"),
        ({"input": "a" * 2000}, "Your input exceeds the context window of this model. This model's maximum"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "odd"}, "truncation: 'odd' isn't known"),
        ({"include": ["odd"]}, "include: 'odd' isn't known"),
        ({"text": {"odd": 1}}, "text: there is no 'odd'"),
        ({"text": {"format": {"type": "odd"}}}, "text.format: 'odd' isn't a type"),
        ({"reasoning": {"effort": 3}}, "reasoning: effort: 3 isn't an effort"),
        ({"tools": [{"type": "odd"}]}, "tools[0]: it has the type 'odd'"),
        ({"top_logprobs": 3}, "top_logprobs: nothing shows them"),
        ({"max_output_tokens": 0}, "max_output_tokens: 0 is out of range"),
    ],
)
def test_a_body_that_is_wrong(agents: Server, more: dict[str, Any], said: str) -> None:
    for stream in (False, True):
        reply = agents.ask("POST", PATH, BASE | more | {"stream": stream})
        assert reply.status == 400 and said in reply.json["error"]["message"], reply.body


def test_a_previous_response_that_is_not_there(agents: Server) -> None:
    reply = agents.ask("POST", PATH, BASE | {"previous_response_id": "resp_0"})
    assert reply.status == 404 and reply.json["error"]["param"] == "previous_response_id"


def test_what_is_stored_is_bounded_and_a_tenant_s_own() -> None:
    stored = Stored(most_bytes=1000)
    for i in range(20):
        stored.begin(f"r{i}", _Kept("a", [], dict, object(), True))  # type: ignore[arg-type]
        stored.end(f"r{i}", {"output": [], "text": "x" * 100})
    assert 5 < len(stored) < 10 and stored.bytes <= 1000
    assert stored.find("a", "r19").response()["text"]
    for tenant, name in (("b", "r19"), ("a", "r0")):
        with pytest.raises(ApiError, match="there is no response"):
            stored.find(tenant, name)
    stored.begin("long", _Kept("a", [], dict, object(), True))  # type: ignore[arg-type]
    stored.end("long", {"output": [], "text": "x" * 500})
    with pytest.raises(ApiError):
        stored.find("a", "long")
    stored.delete("a", "r19")
    stored.end("r18", None)  # it is done: nothing changes
    assert stored.find("a", "r18")


def test_an_item_is_referred_to_by_its_id(client: openai.OpenAI, agents: Server) -> None:
    """The AI SDK does so on each turn after the first."""
    first = client.responses.create(model="tools", input="Go", max_output_tokens=4, extra_body={"seed": 1})
    (item,) = first.output
    whole: list[Any] = [{"role": "user", "content": "Go"}, item.model_dump(), {"role": "user", "content": "On"}]
    named = [whole[0], {"type": "item_reference", "id": item.id}, whole[2]]
    short = [whole[0], {"id": item.id}, whole[2]]
    counts = {
        client.responses.input_tokens.count(model="tools", input=one).input_tokens for one in (whole, named, short)
    }
    assert len(counts) == 1
    texts = [
        client.responses.create(model="tools", input=one, max_output_tokens=4, extra_body={"seed": 1}).output_text
        for one in (whole, named)
    ]
    assert texts[0] == texts[1]
    (listed, *_) = client.responses.input_items.list(first.id).data
    client.responses.create(model="tools", input=[{"type": "item_reference", "id": listed.id}], max_output_tokens=1)
    client.responses.delete(first.id)
    for name in ("msg_0", item.id):
        # The answer above was stored with the conversation, so that its items stay until it goes too.
        body = BASE | {"input": [{"type": "item_reference", "id": name}], "max_output_tokens": 1}
        reply = agents.ask("POST", PATH, body)
        assert reply.status == (404 if name == "msg_0" else 200), reply.body
        if reply.status == 404:
            error = reply.json["error"]
            assert error["message"].startswith("Item with id 'msg_0' not found.") and error["param"] == "input"
    odd = agents.ask("POST", PATH, BASE | {"input": [{"type": "item_reference", "id": 3}]})
    assert odd.status == 400 and "a reference has no id" in odd.json["error"]["message"]


def test_items_that_are_not_stored_are_not_found(agents: Server) -> None:
    answer = agents.ask("POST", PATH, BASE | {"max_output_tokens": 2, "store": False}).json
    body = BASE | {"input": [{"type": "item_reference", "id": answer["output"][0]["id"]}]}
    for path, fields in ((PATH, body), (f"{PATH}/input_tokens", {k: body[k] for k in ("model", "input")})):
        assert agents.ask("POST", path, fields).status == 404


def test_items_go_with_the_last_response_that_has_them() -> None:
    stored = Stored(most_bytes=4000)
    reference = {"id": "msg_1", "type": "message"}
    for name, items in (("r0", []), ("r1", [reference])):
        stored.begin(name, _Kept("a", items, dict, object(), True))  # type: ignore[arg-type]
        stored.end(name, {"output": [] if items else [reference]})
    assert stored.item("a", "msg_1") == reference and stored.item("b", "msg_1") is None
    stored.delete("a", "r0")
    assert stored.item("a", "msg_1") == reference
    stored.delete("a", "r1")
    assert stored.item("a", "msg_1") is None
    for i in range(100):
        stored.begin(f"r{i}", _Kept("a", [], dict, object(), True))  # type: ignore[arg-type]
        stored.end(f"r{i}", {"output": [{"id": f"msg_{i}"}]})
    there = [i for i in range(100) if stored.item("a", f"msg_{i}") is not None]
    assert there == [*range(100 - len(stored), 100)] and 5 < len(stored) < 16, "the index is counted"
    stored.begin("long", _Kept("a", [], dict, object(), True))  # type: ignore[arg-type]
    stored.end("long", {"output": [{"id": "msg_long"}], "text": "x" * 2000})
    assert stored.item("a", "msg_long") is None


@pytest.mark.parametrize("odd", [[], {}, 3, None, ["message"]])
def test_an_item_of_an_odd_type_is_refused(odd: Any) -> None:
    with pytest.raises(RequestError, match=r"^input\[0\]: .* isn't a type of item"):
        items_of([{"type": odd, "content": "a"}])


@pytest.mark.parametrize("odd", [[], {}, 3, "a\r\nx-odd: 1"])
def test_a_namespace_of_an_odd_name_is_refused(agents: Server, odd: Any) -> None:
    body = BASE | {"tools": [{"type": "namespace", "name": odd, "tools": [WEATHER]}]}
    reply = agents.ask("POST", PATH, body)
    assert reply.status in (200, 400) and "x-odd" not in reply.headers, reply.body


def test_a_header_has_no_more_of_a_client_s_names_than_fits_a_line(agents: Server) -> None:
    tools = [{"type": "web_search\r\nx-odd: 1" + "\u20ac" * 60_000}]
    reply = agents.ask("POST", PATH, BASE | {"tools": tools})
    assert reply.status == 200, reply.body
    ignored = reply.headers["x-enginewright-ignored"]
    assert ignored.startswith("tools[0] (web_search??x-odd: 1???") and len(ignored) <= 1024
    assert "x-odd" not in reply.headers


def test_a_query_of_an_odd_type_is_an_error_of_the_protocol(agents: Server) -> None:
    for query in ("stream=maybe", "stream="):
        reply = agents.ask("GET", f"{PATH}/resp_0?{query}")
        error = reply.json["error"]
        assert reply.status == 400 and error["param"] == "stream" and error["type"] == "invalid_request_error"


def test_no_tenant_s_responses_push_out_another_s() -> None:
    stored = Stored(most_bytes=1000)
    for i in range(100):
        tenant = "a" if i == 0 else "b"
        stored.begin(f"r{i}", _Kept(tenant, [], dict, object(), True))  # type: ignore[arg-type]
        stored.end(f"r{i}", {"output": [], "text": "x" * 100})
    assert stored.find("a", "r0") and stored.find("b", "r99") and stored.bytes <= 1000
    with pytest.raises(ApiError):
        stored.find("b", "r1")


def test_items_are_messages() -> None:
    items = items_of(
        [
            {"role": "developer", "content": "D"},
            {"role": "user", "content": [{"type": "input_text", "text": "U"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "one"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "S"}]},
            {"type": "custom_tool_call", "call_id": "3", "name": "c", "input": "x"},
        ]
    )
    messages, _ = messages_of(items, "I")
    assert [one["role"] for one in messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert (
        messages[0]["content"] == "I\n\nD" and messages[2]["reasoning_content"] == "R" and messages[2]["content"] == "A"
    )
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["1", "2"] and messages[4]["content"] == "two"
    assert messages[5]["reasoning_content"] == "S" and messages[5]["tool_calls"][0]["custom"] == {
        "name": "c",
        "input": "x",
    }
    with pytest.raises(RequestError, match=r"input\[0\]: its call_id isn't a text"):
        messages_of(items_of([{"type": "function_call", "name": "f", "arguments": "{}"}]), None)


def test_tools_of_a_namespace_and_such_as_openai_runs(agents: Server) -> None:
    """Codex sends these."""
    space = {"type": "namespace", "name": "agents", "description": "Others.", "tools": [WEATHER]}
    options = {"tools": [space, {"type": "web_search", "external_web_access": False}], "tool_choice": "required"}
    whole = agents.ask("POST", PATH, BASE | options | {"parallel_tool_calls": False})
    assert whole.status == 200, whole.body
    assert "tools[1] (web_search)" in whole.headers["x-enginewright-ignored"]
    first = both(agents, **options, parallel_tool_calls=False)
    (call,) = first["output"]
    assert (call["namespace"], call["name"]) == ("agents", "weather")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    body = BASE | {"tools": [space], "max_output_tokens": 1, "input": [result], "previous_response_id": first["id"]}
    second = agents.ask("POST", PATH, body)
    assert second.status == 200 and second.json["enginewright"]["spliced_tokens"], second.body
    refused = agents.ask("POST", PATH, BASE | options | {"tool_choice": {"type": "web_search"}})
    assert refused.status == 400 and "nobody runs 'web_search' here" in refused.json["error"]["message"]
