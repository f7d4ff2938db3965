"""Programs parse error messages: each kind of error has the words that clients, agents and proxies look for."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginewright.runtime.server.engines.records import Problem
from enginewright.runtime.server.http.errors import (
    ANTHROPIC,
    NO_KEY,
    NO_MODEL,
    OLLAMA,
    OPENAI,
    RATE,
    RESPONSES,
    WORDS,
    WRONG_KEY,
    ApiError,
    api_error,
    protocol_of,
)
from enginewright.runtime.shared.errors import ContextError, OverloadError
from tests.runtime.server.conftest import Reply
from tests.runtime.server.in_process import InProcess

PATHS = {
    OPENAI: "/v1/chat/completions",
    RESPONSES: "/v1/responses",
    ANTHROPIC: "/v1/messages",
    OLLAMA: "/api/chat",
}
LONG = "long " * 40_000
BODIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "/v1/chat/completions": ("messages", {"messages": [{"role": "user", "content": LONG}]}),
    "/v1/completions": ("prompt", {"prompt": LONG}),
    "/v1/responses": ("input", {"input": LONG}),
    "/v1/responses/input_tokens": ("input", {"input": LONG}),
    "/v1/messages": ("messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 3}),
    "/api/chat": ("messages", {"model": "m", "messages": [{"role": "user", "content": LONG}]}),
    "/api/generate": ("prompt", {"model": "m", "prompt": LONG}),
}
VALUES = {"context": 8192, "room": 8191, "tokens": "9031", "most": 8192, "model": "odd", "models": "m", "item": "x"}


def parts(reply: Reply, path: str) -> tuple[str, str | None]:
    """The message and the code of an error in the shape of its protocol."""
    body = reply.json
    if protocol_of(path) == OLLAMA:
        return body["error"], None
    if protocol_of(path) == ANTHROPIC:
        assert {*body} == {"type", "error", "request_id"}
        return body["error"]["message"], None
    return body["error"]["message"], body["error"]["code"]


@pytest.mark.parametrize("problem", list(WORDS))
@pytest.mark.parametrize("protocol", list(PATHS))
def test_what_programs_look_for_is_there(problem: str, protocol: str) -> None:
    error = ApiError(400, "detail {as it is}", problem=problem, values=VALUES, retry_after=2.6)
    words = WORDS[problem].get(protocol) or WORDS[problem][OPENAI]
    body = error.body_for(PATHS[protocol])
    text = body["error"] if protocol == OLLAMA else body["error"]["message"]
    code = body["error"].get("code") if protocol in (OPENAI, RESPONSES) else None
    assert code is None or isinstance(code, str)
    if protocol in WORDS[problem]:
        for program, pattern in words.patterns.items():
            assert any(re.search(pattern, one) for one in (text, code or "")), (program, pattern, text, code)
    assert "{" not in text.replace("{as it is}", "")


@pytest.mark.parametrize("path", list(BODIES))
def test_a_prompt_that_does_not_fit(tiny_bundle: Path, path: str) -> None:
    async def ask() -> tuple[Reply, int]:
        server = InProcess(tiny_bundle)
        try:
            return await server.ask(path, BODIES[path][1]), server.front.models["m"].model.context_length
        finally:
            await server.front.close()

    reply, context = asyncio.run(ask())
    assert reply.status == 400, reply.body
    message, code = parts(reply, path)
    param = BODIES[path][0]
    if protocol_of(path) in (OPENAI, RESPONSES):
        assert code == "context_length_exceeded" and reply.json["error"]["param"] == param
        assert code in message  # where langchain-openai 1.7 looks for it
    if protocol_of(path) == ANTHROPIC:
        tokens, most = map(int, re.findall(r"\d+", message))
        assert re.search(r"prompt is too long[^0-9]*\d+ tokens > \d+ maximum", message) and tokens > most == context
    else:
        length = rf"This model's maximum context length is {context} tokens. However, your {param} resulted in"
        tokens = int(re.search(length + r" (?:at least )?(\d+) tokens", message)[1])  # type: ignore[index]
        assert tokens > context


def test_the_number_of_tokens_is_exact_where_it_is_known() -> None:
    context_error = ContextError("prompt: too long", hint="Shorten it.", context=8192, tokens=9031)
    sent = msgspec.msgpack.encode(Problem.from_error(context_error))
    there = msgspec.msgpack.decode(sent, type=Problem).error()  # as it comes from the engine's process
    assert vars(there) == vars(context_error) and type(there) is ContextError
    body = api_error(there).body_for("/v1/chat/completions")  # type: ignore[arg-type]
    assert body["error"]["message"].startswith(
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9031 tokens. "
    )
    assert body["error"]["param"] == "messages" and body["error"]["type"] == "invalid_request_error"
    full = api_error(ContextError("prompt: too long", context=8192, tokens=8192))
    assert full.body_for("/v1/messages")["error"]["message"] == "prompt is too long: 8192 tokens > 8191 maximum"
    tools = api_error(ContextError("tools: too long", context=8192, tokens=8193, exact=False))
    error = tools.body_for("/v1/chat/completions")["error"]
    assert error["param"] == "tools" and "your tools resulted in at least 8193 tokens" in error["message"]


def test_keys_models_paths_and_bodies(tiny_bundle: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"secret-key-of-one").hexdigest()
    keys.write_text(f'[[keys]]\nhash = "sha256:{digest}"\ntenant = "one"\n')
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    bodies = {OPENAI: body, RESPONSES: {"input": "a"}, ANTHROPIC: body, OLLAMA: {"messages": body["messages"]}}
    good = {"authorization": "Bearer secret-key-of-one"}

    async def check() -> None:
        server = InProcess(tiny_bundle, api_keys=str(keys))
        try:
            for protocol, path in PATHS.items():
                for problem, status, headers in (
                    (NO_KEY, 401, {}),
                    (WRONG_KEY, 401, {"authorization": "Bearer another"}),
                    (NO_MODEL, 404, good),
                ):
                    reply = await server.ask(path, {**bodies[protocol], "model": "odd"}, headers=headers)
                    assert reply.status == status, reply.body
                    message, code = parts(reply, path)
                    words = WORDS[problem].get(protocol) or WORDS[problem][OPENAI]
                    assert code == words.code and "another" not in message
                    for pattern in words.patterns.values():
                        assert any(re.search(pattern, one) for one in (message, code or "")), (message, code)
            for encoding in ("gzip", "deflate", "br", "zstd", "gzip, br"):
                data = gzip.compress(json.dumps(body).encode())
                sent = good | {"content-length": str(len(data))}
                reply = await server.ask(PATHS[OPENAI], data, headers=sent | {"content-encoding": encoding})
                assert reply.status == 415 and reply.headers["accept-encoding"] == "identity"
                assert f"compressed ({encoding})" in reply.json["error"]["message"]
            sent = good | {"content-length": "2", "content-encoding": "identity"}
            reply = await server.ask(PATHS[OPENAI], b"[]", headers=sent)
            assert reply.status == 400 and "compressed" not in reply.json["error"]["message"]
            for path, meant in (
                ("/chat/completions", "/v1/chat/completions"),
                ("/v1/v1/chat/completions/", "/v1/chat/completions"),
                ("/models", "/v1/models"),
                ("/v1/v1/messages", "/v1/messages"),
                ("/v1/api/chat", "/api/chat"),
                ("/completions", "/v1/completions"),
            ):
                error = (await server.ask(path, body, headers=good)).json["error"]
                message = error["message"]
                assert f"Unknown request URL: POST {path}. Did you mean {meant}? " in message
                if "code" in error:
                    assert error["code"] == "unknown_url"
            for path, meant in (
                ("/v1/chat/completion", "/v1/chat/completions"),
                ("/v1/modles", "/v1/models"),
                ("/v1/mesages", "/v1/messages"),
                ("/api/chats", "/api/chat"),
                ("/helth", "/health"),
            ):
                message, _ = parts(await server.ask(path, body, headers=good), path)
                assert message.endswith(f"Did you mean {meant}?"), message
            message = (await server.ask("/odd", body, headers=good)).json["error"]["message"]
            assert message == "Unknown request URL: POST /odd."
        finally:
            await server.front.close()

    asyncio.run(check())


HELLO = [{"role": "user", "content": "a"}]
RANGE = "-5 is out of range. It must be 1 or more, or -1 for the rest of the context."
LIMITS = {
    "/v1/chat/completions": {"max_tokens": {"max_tokens": -5}, "max_completion_tokens": {"max_completion_tokens": -5}},
    "/v1/completions": {"max_tokens": {"max_tokens": -5}},
    "/v1/responses": {"max_output_tokens": {"max_output_tokens": -5}},
    "/v1/messages": {"max_tokens": {"max_tokens": -5}},
    "/api/chat": {"options.num_predict": {"options": {"num_predict": 0}}},
}
"""Path -> the field that limits an answer's tokens -> a body's part with an impossible limit. Ollama's own servers take
any negative limit as none."""
MISSPELLED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "message": (PATHS[OPENAI], {"messages": [{"role": "user", "contnt": "a"}]}, "content by contnt"),
    "role": (PATHS[OPENAI], {"messages": [{"rol": "user", "content": "a"}]}, "role by rol"),
    "part": (PATHS[OPENAI], {"messages": [{"role": "user", "content": [{"type": "txt", "text": "a"}]}]}, "text"),
    "stream": (PATHS[OPENAI], {"messages": HELLO, "stream_options": {"include_usge": True}}, "include_usage"),
    "schema": (
        PATHS[OPENAI],
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schma": {"schema": {}}}},
        "json_schema by json_schma",
    ),
    "format": (PATHS[OPENAI], {"messages": HELLO, "response_format": {"type": "json_schem"}}, "json_schema"),
    "tool": (
        PATHS[OPENAI],
        {"messages": HELLO, "tools": [{"type": "function", "functon": {"name": "x"}}]},
        "function by functon",
    ),
    "structured": (PATHS[OPENAI], {"messages": HELLO, "structured_outputs": {"jsn": {}}}, "json"),
    "reasoning": (PATHS[OPENAI], {"messages": HELLO, "reasoning": {"efort": "low"}}, "effort"),
    "text": (PATHS[RESPONSES], {"input": "a", "text": {"fromat": {"type": "text"}}}, "format"),
    "text.format": (
        PATHS[RESPONSES],
        {"input": "a", "text": {"format": {"type": "json_schema", "shema": {}}}},
        "schema by shema",
    ),
    "item": (PATHS[RESPONSES], {"input": [{"type": "mesage", "role": "user", "content": "a"}]}, "message"),
    "thinking": (
        PATHS[ANTHROPIC],
        {"messages": HELLO, "max_tokens": 5, "thinking": {"type": "enabled", "budget_token": 5}},
        "budget_tokens",
    ),
    "option": (PATHS[OLLAMA], {"model": "m", "messages": HELLO, "options": {"temprature": 1}}, "temperature"),
}
"""Part of a body -> path, a body with a misspelled name in that part, and the hint's words."""


def test_a_limit_out_of_range_and_misspelled_parts(tiny_bundle: Path) -> None:
    async def check() -> None:
        server = InProcess(tiny_bundle)
        try:
            for path, limits in LIMITS.items():
                for field, limit in limits.items():
                    body = {"input": "a"} if "responses" in path else {"model": "m", "messages": HELLO}
                    body = {"prompt": "a"} if path == "/v1/completions" else body
                    reply = await server.ask(path, body | limit)
                    message, _ = parts(reply, path)
                    value = RANGE.replace("-5", "0") if "num_predict" in field else RANGE
                    assert reply.status == 400 and message == f"{field}: {value}"
                    if protocol_of(path) in (OPENAI, RESPONSES):
                        assert reply.json["error"]["param"] == field
            for part, (path, body, hint) in MISSPELLED.items():
                reply = await server.ask(path, body)
                message, _ = parts(reply, path)
                assert reply.status == 400 and f"Did you mean {hint}? " in message, (part, message)
        finally:
            await server.front.close()

    asyncio.run(check())


def test_a_rate_limit_says_when_to_come_back() -> None:
    error = api_error(OverloadError("64 requests wait", retry_after=2.6))
    assert error.status == 429 and error.headers == {"retry-after": "3"} and error.problem == RATE
    body = error.body_for("/v1/chat/completions")["error"]
    assert (body["type"], body["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert body["message"] == "Rate limit reached: 64 requests wait. Please try again in 3s."
    assert "rate" not in api_error(ContextError("prompt: x", context=9, tokens=10)).body_for("/api/chat")["error"]
