"""Every field is honoured, refused or named as ignored; what is malformed is a 4xx that says what."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from enginewright.runtime.server.app import BODIES
from enginewright.runtime.server.http.fields import HINTS, Fields, decoded
from enginewright.runtime.server.http.options import ServerOptions
from enginewright.runtime.server.protocols.bodies import HARMLESS, REFUSED, RENAMED, Body, ChatBody, CompletionBody
from enginewright.runtime.shared.errors import RequestError
from tests.runtime.server.conftest import Server

CHAT = "/v1/chat/completions"
SAID = [{"role": "user", "content": "Hi"}]


def tool(name: str) -> dict[str, Any]:
    """A tool, which is also how one is chosen."""
    return {"type": "function", "function": {"name": name}}


def test_the_three_tables_are_apart() -> None:
    honoured = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
    assert not honoured & set(REFUSED) and not honoured & HARMLESS and not set(REFUSED) & HARMLESS
    assert not set(RENAMED) & (honoured | set(REFUSED) | HARMLESS) and set(RENAMED.values()) <= honoured
    # OpenAI's own fields, of both: each is in one of the tables.
    openai = {
        *("messages", "model", "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs"),
        *("max_completion_tokens", "max_tokens", "metadata", "modalities", "n", "parallel_tool_calls", "prediction"),
        *("presence_penalty", "prompt_cache_key", "reasoning_effort", "response_format", "safety_identifier", "seed"),
        *("service_tier", "stop", "store", "stream", "stream_options", "temperature", "tool_choice", "tools"),
        *("top_logprobs", "top_p", "user", "verbosity", "web_search_options", "prompt", "best_of", "echo", "suffix"),
        *("prompt_cache_retention",),
    }
    assert openai <= honoured | set(REFUSED) | HARMLESS


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_result_is_refused_by_name(name: str) -> None:
    body: dict[str, Any] = {"messages": SAID}
    for value in REFUSED[name].values:
        decoded(json.dumps(body | {name: value}).encode(), ChatBody)
    for value in ("odd", 7, [1], {"a": 1}):
        with pytest.raises(RequestError, match=f"^{name}: "):
            decoded(json.dumps(body | {name: value}).encode(), ChatBody)


def test_what_is_ignored_is_named(server: Server) -> None:
    reply = server.chat("Hi", max_tokens=1, user="me", metadata={"a": "b"}, service_tier=None)
    assert reply.status == 200 and reply.headers["x-enginewright-ignored"] == "user, metadata"
    assert "x-enginewright-ignored" not in server.chat("Hi", max_tokens=1).headers


OF_TEXTS = dict.fromkeys(("input", "inputs", "query", "text_1", "text_2"), "a")
"""The needed fields of bodies that ask for numbers of texts."""


@pytest.mark.parametrize("kind", sorted(set(BODIES.values()), key=lambda kind: kind.__name__))
def test_null_asks_for_nothing(kind: type[Fields]) -> None:
    needed = {
        **{"messages": SAID, "prompt": "a", "tokens": [1], "model": "m", "input_prefix": "a", "input_suffix": "b"},
        **{"stream_options": {"include_usage": True, "odd": None}},
        **OF_TEXTS,
    }
    body = {name: value for name, value in needed.items() if name in kind.__struct_fields__}
    names = {"odd", "best_of", "grammar", *HINTS, *REFUSED, *RENAMED, *kind.refused, *kind.__struct_fields__} - set(
        body
    )
    assert decoded(json.dumps(body | dict.fromkeys(names)).encode(), kind) == decoded(json.dumps(body).encode(), kind)


@pytest.mark.parametrize("kind", sorted(set(BODIES.values()), key=lambda kind: kind.__name__))
def test_whole_numbers_may_be_floats(kind: type[Fields]) -> None:
    body = {"messages": SAID, "prompt": [1.0, 2e0], "tokens": [3.0], "model": "m"}
    body |= {"input_prefix": "a", "input_suffix": "b", **OF_TEXTS}
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    body = {name: value for name, value in body.items() if name in types}
    if types.get("prompt") is str:
        body["prompt"] = "a"
    for field in msgspec.structs.fields(kind):
        if field.type == int | None:
            value = 1.0
        elif field.type == list[int] | None:
            value = [1.0, 2.0]
        else:
            continue
        number = getattr(decoded(json.dumps(body | {field.name: value}).encode(), kind)[0], field.name)
        assert number == value and "." not in repr(number)
        for wrong in (1.5, True, 1e300, [1.5]):
            with pytest.raises(RequestError, match=rf"^{field.name}(\[0\])?: expected"):
                decoded(json.dumps(body | {field.name: wrong}).encode(), kind)


def test_clients_that_have_floats_alone_get_the_same_answer(server: Server) -> None:
    options = {"max_tokens": 3, "seed": 5, "top_k": 4, "n": 1, "stop_token_ids": [2]}
    as_floats = {
        name: [float(one) for one in value] if isinstance(value, list) else float(value)
        for name, value in options.items()
    }
    assert server.chat("Hi", **options).text == server.chat("Hi", **as_floats).text
    assert server.complete([5, 6], **options).text == server.complete([5.0, 6.0], **as_floats).text


def test_minus_one_token_is_as_many_as_there_is_room_for(server: Server) -> None:
    room = {"ignore_eos": True, "temperature": 0}
    unlimited = server.chat("Hi", **room)
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        assert server.chat("Hi", **room, **{name: -1}).text == unlimited.text
    context = server.props()["context_length"]
    assert server.complete([5, 6], max_tokens=-1, **room).json["usage"]["total_tokens"] == context


def test_fields_have_other_servers_names_too(server: Server) -> None:
    plain = server.chat("Tell me", max_tokens=8, repetition_penalty=1.7, seed=4, typical_p=0.5)
    reply = server.chat("Tell me", num_predict=8, repeat_penalty=1.7, random_seed=4, typ_p=0.5)
    assert reply.text == plain.text and "x-enginewright-ignored" not in reply.headers
    twice = server.chat("Tell me", n_predict=8, max_tokens=9)
    assert twice.status == 400 and twice.json["error"]["param"] == "max_tokens"
    assert server.chat("Tell me", n_predict=8, max_tokens=8).status == 200
    assert server.chat("Tell me", n_predict="8").json["error"]["param"] == "n_predict"


def test_hints_of_clients_are_named(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        hints = {"cache_prompt": True, "num_ctx": 8192, "keep_alive": "5m", "ttl": 60, "session_id": "a", "id_slot": -1}
        for endpoint, options in ((client.chat.completions, {"messages": SAID}), (client.completions, {"prompt": "a"})):
            raw = endpoint.with_raw_response.create(model="tiny-llama", max_tokens=1, **options, extra_body=hints)
            assert raw.headers["x-enginewright-ignored"].split(", ") == list(hints)
    for path, body in (("/v1/responses", {"input": "a", "max_output_tokens": 1}), ("/v1/messages", {"max_tokens": 1})):
        reply = server.ask("POST", path, {"messages": SAID, **body, **hints} if "input" not in body else body | hints)
        assert reply.status == 200 and reply.headers["x-enginewright-ignored"].split(", ")[: len(hints)] == list(hints)


@pytest.mark.parametrize(
    ("switch", "effort"),
    [
        ({"enable_thinking": False}, "none"),
        ({"enable_thinking": True}, "on"),
        ({"think": False}, "none"),
        ({"think": "high"}, "high"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "on"),
        ({"reasoning": {"enabled": False}}, "none"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "low"),
        ({"reasoning": {"effort": "none", "exclude": True}}, "none"),
    ],
)
def test_reasoning_is_switched_as_other_servers_have_it(agents: Server, switch: dict[str, Any], effort: str) -> None:
    same = agents.chat("Hi", model="thinking", max_tokens=4, seed=1, return_token_ids=True, reasoning_effort=effort)
    reply = agents.chat("Hi", model="thinking", max_tokens=4, seed=1, return_token_ids=True, **switch)
    assert reply.json["prompt_token_ids"] == same.json["prompt_token_ids"]
    parts = [f"{name}.{part}" for name, fields in switch.items() if isinstance(fields, dict) for part in fields]
    named = [one for one in parts if one.partition(".")[2] in ("budget_tokens", "summary")]
    assert reply.headers.get("x-enginewright-ignored", "") == ", ".join(named)


def test_a_switch_that_the_template_does_not_read_is_named(server: Server) -> None:
    reply = server.chat("Hi", max_tokens=1, enable_thinking=False)
    assert reply.headers["x-enginewright-ignored"] == "enable_thinking"
    for wrong in (
        {"reasoning": {"effort": 3}},
        {"thinking": {"odd": 1}},
        {"thinking": {"type": "odd"}},
        {"reasoning": 3},
    ):
        reply = server.chat("Hi", max_tokens=1, **wrong)
        assert reply.status == 400 and reply.json["error"]["param"] == next(iter(wrong))


BUDGETS = (
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"thinking_budget": 5.0}, "thinking_token_budget"),
    ({"reasoning_budget": 5}, "thinking_token_budget"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
)


@pytest.mark.parametrize(("field", "name"), BUDGETS)
def test_a_budget_of_reasoning_has_the_names_of_other_servers(field: dict[str, Any], name: str) -> None:
    body, ignored = decoded(json.dumps({"messages": SAID, **field}).encode(), ChatBody)
    assert body.reasoning_budget() == (name, 5) and not ignored and not body.ignored_parts()
    none = {key: -1 if not isinstance(value, dict) else {**value, [*value][-1]: -1} for key, value in field.items()}
    assert decoded(json.dumps({"messages": SAID, **none}).encode(), ChatBody)[0].reasoning_budget() is None
    wrong = {key: -2 if not isinstance(value, dict) else {**value, [*value][-1]: -2} for key, value in field.items()}
    with pytest.raises(RequestError, match="isn't a number of tokens"):
        decoded(json.dumps({"messages": SAID, **wrong}).encode(), ChatBody)[0].reasoning_budget()
    if name == "thinking_token_budget":
        with pytest.raises(RequestError, match="reasoning is text as any other"):
            decoded(json.dumps({"prompt": "a", **field}).encode(), CompletionBody)


def test_a_budget_that_cannot_be_kept_is_refused_by_name_or_named(agents: Server) -> None:
    """The marks of this model's reasoning are texts, and the other model has no reasoning."""
    for field, name in BUDGETS:
        reply = agents.chat("Hi", model="thinking", max_tokens=9, **field)
        if name == "thinking_token_budget":
            assert reply.status == 400 and reply.json["error"]["param"] == name
        else:
            assert name in reply.headers["x-enginewright-ignored"]
        assert name in agents.chat("Hi", model="tools", max_tokens=9, **field).headers["x-enginewright-ignored"]


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RequestError, match="'max_token': there is no such field") as e:
        decoded(b'{"model": "m", "messages": [], "max_token": 4}', ChatBody)
    assert e.value.hint is not None and e.value.hint.startswith("Did you mean max_tokens? ")
    with pytest.raises(RequestError, match="there is no such field") as e:
        decoded(b'{"model": "m", "messages": [], "%s": 4}' % (b"max_token" * 100), ChatBody)
    assert e.value.hint is not None and "Did you mean" not in e.value.hint


def test_unknown_fields_are_refused_or_named(make_server: Callable[..., Server], tiny_bundle: Path) -> None:
    lenient = make_server(tiny_bundle, "--unknown-fields", "ignore")
    reply = lenient.chat("Hi", max_tokens=1, odd={"a": [1]}, user="u")
    assert reply.status == 200 and reply.headers["x-enginewright-ignored"] == "odd, user"
    assert lenient.chat("Hi", max_tokens=1, grammar="root ::= [0-9]").json["error"]["param"] == "grammar"
    ollama = {"model": "tiny-llama", "prompt": "a", "stream": False, "odd": 1, "options": {"num_predict": 1, "odd": 1}}
    reply = lenient.ask("POST", "/api/generate", ollama)
    assert reply.status == 200 and reply.headers["x-enginewright-ignored"] == "odd, options.odd"
    with pytest.raises(RequestError, match=r"^unknown_fields: "):
        ServerOptions(models={"m": "a"}, unknown_fields="odd").check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "isn't JSON"),
        (b"{", "isn't JSON"),
        (b"[1]", "isn't a JSON object"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "isn't JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "isn't JSON"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "JSON"),
        (b'{"messages": [], "max_tokens": 1e400}', "isn't JSON"),
        ({}, "messages"),
        ({"messages": []}, "no messages"),
        ({"messages": "Hi"}, "messages: expected `array`"),
        ({"messages": [{"role": "user"}]}, "messages[0]: its content is missing"),
        ({"messages": [{"role": 3, "content": "a"}]}, "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]},
            "image_url",
        ),
        ({"messages": SAID, "odd": 1}, "'odd': there is no such field"),
        ({"messages": SAID, "max_tokens": -2}, "max_tokens"),
        ({"messages": SAID, "max_tokens": 0}, "max_tokens"),
        ({"messages": SAID, "max_tokens": "7"}, "max_tokens: expected `int"),
        ({"messages": SAID, "max_tokens": True}, "max_tokens: expected `int"),
        ({"messages": SAID, "temperature": -0.5}, "temperature"),
        ({"messages": SAID, "top_p": 7}, "top_p"),
        ({"messages": SAID, "n": 100_000}, "n"),
        ({"messages": SAID, "num_beams": 33, "max_tokens": 2}, "num_beams"),
        ({"messages": SAID, "top_logprobs": 3}, "top_logprobs: it needs logprobs"),
        ({"messages": SAID, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": SAID, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": SAID, "logit_bias": {"9999999": 1}}, "logit_bias"),
        ({"messages": SAID, "logit_bias": {"0000000000005": 1}}, "logit_bias: '0000000000005' isn't a token id"),
        ({"messages": SAID, "logit_bias": {"05": 1}}, "logit_bias: '05' isn't a token id"),
        ({"messages": SAID, "stop": [""]}, "stop"),
        ({"messages": SAID, "stream_options": {"odd": 1}}, "stream_options"),
        ({"messages": SAID, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": SAID, "chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"messages": SAID, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": SAID, "chat_template_kwargs": {"odd": 1}}, "odd"),
        ({"messages": SAID, "request_class": "none"}, "request_class"),
        ({"messages": SAID, "cache_salt": "x" * 2000}, "cache_salt"),
        ({"messages": [{"role": "user", "content": "long " * 40_000}]}, "maximum context length"),
        ({"messages": [{"role": "user", "content": "long " * 400}]}, "maximum context length"),
        ({"messages": SAID, "grammar": "root ::= [0-9]+"}, "GBNF"),
        ({"messages": SAID, "response_format": {"type": "odd"}}, "response_format: 'odd' isn't a type"),
        ({"messages": SAID, "response_format": {"type": "json_schema"}}, "response_format: its schema is missing"),
        ({"messages": SAID, "structured_outputs": {"odd": 1}}, "structured_outputs: there is no 'odd'"),
        (
            {"messages": SAID, "response_format": {"type": "json_object"}, "guided_regex": "a"},
            "response_format and guided_regex are both given",
        ),
        ({"messages": SAID, "tools": [{"type": "web_search"}]}, "tools[0]: it has the type 'web_search'"),
        ({"messages": SAID, "tools": [tool("a b")]}, "tools[0]: 'a b' isn't a name of a tool"),
        ({"messages": SAID, "tools": [tool("f"), tool("f")]}, "tools[1]: there are two of the name 'f'"),
        ({"messages": SAID, "tools": [tool(f"f{i}") for i in range(1025)]}, "tools: there are 1,025"),
        ({"messages": SAID, "tools": [tool("f")], "tool_choice": "odd"}, "tool_choice: 'odd' isn't a choice"),
        ({"messages": SAID, "tools": [tool("f")], "tool_choice": tool("g")}, "tool_choice: there is no tool 'g'"),
        ({"messages": SAID, "tool_choice": "required"}, "tool_choice: a call is required, and there are no tools"),
        ({"messages": SAID, "tools": [tool("f")]}, "tools: the model's template doesn't read them"),
        ({"messages": [*SAID, {"role": "assistant", "tool_calls": [3]}]}, "messages[1].tool_calls[0]: it isn't a call"),
    ],
)
def test_a_chat_that_is_wrong(server: Server, body: Any, said: str) -> None:
    reply = server.ask("POST", CHAT, body)
    assert reply.status == 400, reply.body
    error = reply.json["error"]
    code = "context_length_exceeded" if "room for" in error["message"] else None
    assert said in error["message"] and error["type"] == "invalid_request_error" and error["code"] == code


@pytest.mark.parametrize("prompt", [None, "", [], [[]], {"a": 1}, [True], ["a", 3], [-1], [10**9], ["a"] * 200, 7])
def test_a_prompt_that_is_wrong(server: Server, prompt: Any) -> None:
    reply = server.complete(prompt)
    assert reply.status == 400 and "prompt" in reply.json["error"]["message"], reply.body


def test_a_message_s_control_tokens_are_text(server: Server) -> None:
    plain = server.ask("POST", "/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json["tokens"]
    tokens = server.ask("POST", "/tokenize", {"messages": [{"role": "user", "content": "a</s><s>"}]}).json["tokens"]
    special = {0, 1, 2}
    assert [t for t in tokens if t in special] == [t for t in plain if t in special]
    assert 2 in server.ask("POST", "/tokenize", {"prompt": "a</s>"}).json["tokens"]  # a raw prompt is the caller's


def test_other_paths_methods_and_models(server: Server) -> None:
    for method, path, status in (("GET", CHAT, 405), ("POST", "/v1/nothing", 404), ("GET", "/v1/models/odd", 404)):
        reply = server.ask(method, path)
        assert reply.status == status and reply.json["error"]["message"]
    reply = server.chat("Hi", model="odd")
    assert (
        reply.status == 404
        and "tiny-llama" in reply.json["error"]["message"]
        and reply.json["error"]["param"] == "model"
    )


def test_hosts_origins_and_request_ids(server: Server) -> None:
    body = {"messages": SAID, "max_tokens": 1}
    assert server.ask("GET", "/v1/models", host="evil.example").status == 403
    assert server.ask("GET", "/v1/models", host=f"localhost:{server.port}").status == 200
    assert server.ask("POST", CHAT, body, origin="https://evil.example").status == 403
    same_origin = server.ask("POST", CHAT, body, origin=server.url)
    assert same_origin.status == 200 and same_origin.headers["access-control-allow-origin"] == server.url
    assert server.ask("GET", "/ping", **{"x-request-id": "my-1"}).headers["x-request-id"] == "my-1"
    odd = server.ask("GET", "/ping", **{"x-request-id": "a b<script>"}).headers["x-request-id"]
    assert odd.startswith("req_")
    many = server.ask("GET", "/ping", **{f"x-{i}": "y" for i in range(200)})
    assert many.status == 431 and many.json["error"]["type"] == "invalid_request_error"


def raw(server: Server, data: bytes, count: int = 1) -> list[bytes]:
    """Status lines of what a connection gets for these bytes."""
    with server.connect() as link:
        link.settimeout(60)
        link.sendall(data)
        received = b""
        try:
            while received.count(b"HTTP/1.1 ") < count and (piece := link.recv(65536)):
                received += piece
        except (TimeoutError, ConnectionResetError):
            pass
    return re.findall(rb"HTTP/1\.1 [^\r]*", received)


def test_requests_that_are_not_http(server: Server) -> None:
    host = f"Host: 127.0.0.1:{server.port}\r\n".encode()
    many = b"".join(b"x-%d: y\r\n" % i for i in range(10_000))
    for data in (b"\0\1\2\3\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n" + host + many + b"\r\n"):
        for line in raw(server, data):
            assert line.split()[1].startswith(b"4"), line
    length = b"POST /v1/completions HTTP/1.1\r\n" + host + b"content-length: %d\r\n\r\n"
    assert b" 413 " in raw(server, length % (1 << 40))[0]
    assert raw(server, b"GET /ping HTTP/1.1\r\n" + host + b"\r\n")[0].split()[1] == b"200"


def test_pipelined_requests_are_all_answered(server: Server) -> None:
    one = f"GET /version HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode()
    assert [line.split()[1] for line in raw(server, one * 3, 3)] == [b"200"] * 3


def test_a_long_pipelined_request_is_not_an_idle_connection(
    make_server: Callable[..., Server], tiny_bundle: Path, tmp_path: Path
) -> None:
    config = tmp_path / "server.toml"
    config.write_text("header_seconds = 1.0\n")
    server = make_server(tiny_bundle, "--config", config)
    body = b'{"prompt": [5, 6], "max_tokens": 1}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    first = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
    (pid,) = server.engines()
    os.kill(pid, signal.SIGSTOP)
    with server.connect() as link:
        link.sendall(first + head + body)
        server.wait(lambda: server.props()["requests"] == 1)
        time.sleep(2)  # longer than a connection may be idle
        os.kill(pid, signal.SIGCONT)
        data = b""
        while data.count(b"HTTP/1.1 200") < 2 and (piece := link.recv(65536)):
            data += piece
    assert data.count(b"HTTP/1.1 200") == 2, data


def test_bodies_at_random_never_fail_the_server(server: Server) -> None:
    """Fields with values of any kind: a 4xx, or an answer; and the engine goes on."""
    rng = random.Random(7)
    values: list[Any] = [
        None,
        True,
        0,
        -1,
        1 << 70,
        0.5,
        1e300,
        "",
        "x",
        "\ud83d\ude00",
        [],
        [1],
        ["a"],
        {},
        {"a": 1},
        [[]],
    ]
    names = [name for name in (*ChatBody.__struct_fields__, *REFUSED) if name != "messages"]
    for _ in range(250):
        body: dict[str, Any] = {"messages": SAID, "max_tokens": 1}
        for name in rng.sample(names, rng.randint(1, 3)):
            body[name] = rng.choice(values)
        if rng.random() < 0.3:
            message: dict[str, Any] = {
                key: rng.choice(values) for key in rng.sample(["role", "content", "name", "tool_calls"], 2)
            }
            body["messages"] = [rng.choice([message, {"role": "user", "content": rng.choice(values)}])]
        reply = server.ask("POST", CHAT, body)
        assert reply.status in (200, 400, 404), (body, reply.body)
    assert server.props()["deaths"] == 0


def test_body_of_each_kind_has_defaults_that_ask_for_nothing() -> None:
    body, ignored = decoded(b'{"messages": []}', ChatBody)
    assert not ignored and all(getattr(body, name) is None for name in Body.__struct_fields__)
