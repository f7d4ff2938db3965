"""Schemas of clients, from the client's side: closed in every protocol, and never a reason to end a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.runtime.shared.closed_schemas import DEAD, DIGIT, ENDLESS, TEXT, thing

from .conftest import Server

ASKED = [{"role": "user", "content": "Go"}]
CHAT = "/v1/chat/completions"
IGNORED = "x-enginewright-ignored"
OPEN = {"$defs": {"A": thing(a=DIGIT)}, "allOf": [{"$ref": "#/$defs/A"}, thing(b=DIGIT)]}
LOOSE = {
    **thing(a={**DIGIT, "format": "int64"}, b={**TEXT, "format": "path"}),
    "x-order": 1,
    "not": {"required": ["c"]},
}


def tool(name: str, parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def forms(schema: Any) -> list[tuple[str, dict[str, Any]]]:
    """Requests of the protocols that hold an answer to a schema."""
    named = {"name": "n", "schema": schema}
    chat: dict[str, Any] = {"model": "tools", "messages": ASKED, "max_tokens": 200, "seed": 5}
    prompt: dict[str, Any] = {"model": "tools", "prompt": "Go", "max_tokens": 200, "seed": 5}
    return [
        (CHAT, {**chat, "response_format": {"type": "json_schema", "json_schema": named}}),
        (CHAT, {**chat, "response_format": {"type": "json_schema", "json_schema": {**named, "strict": True}}}),
        (CHAT, {**chat, "model": "thinking", "reasoning_effort": "none", "json_schema": schema}),
        ("/v1/completions", {**prompt, "guided_json": schema}),
        ("/v1/completions", {**prompt, "guided_json": json.dumps(schema)}),
        ("/api/chat", {"model": "tools", "messages": ASKED, "stream": False, "format": schema}),
        ("/v1/responses", {"model": "tools", "input": "Go", "text": {"format": {"type": "json_schema", **named}}}),
    ]


def content(path: str, reply: Any) -> str:
    if path == CHAT:
        return str(reply["choices"][0]["message"]["content"])
    if path == "/v1/completions":
        return str(reply["choices"][0]["text"])
    if path == "/api/chat":
        return str(reply["message"]["content"])
    return "".join(part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"])


def test_declared_properties_alone_in_every_protocol(agents: Server) -> None:
    for path, body in forms(OPEN):
        reply = agents.ask("POST", path, body)
        assert reply.status == 200, (path, reply.body)
        assert json.loads(content(path, reply.json)).keys() == {"a", "b"}, path
        assert "schema" not in reply.headers.get(IGNORED, "")


def test_what_cannot_be_enforced_is_named_in_every_protocol(agents: Server) -> None:
    for path, body in forms(LOOSE):
        reply = agents.ask("POST", path, body)
        assert reply.status == 200, (path, reply.body)
        assert json.loads(content(path, reply.json)).keys() == {"a", "b"}, path
        assert {"schema.format", "schema.not"} <= set(reply.headers[IGNORED].split(", ")), path


@pytest.mark.parametrize("name", [*(f"dead: {one}" for one in DEAD), *(f"endless: {one}" for one in ENDLESS)])
def test_a_dead_end_is_an_error_of_the_request(agents: Server, name: str) -> None:
    kind, _, key = name.partition(": ")
    schema = {"dead": DEAD, "endless": ENDLESS}[kind][key]
    for path, body in forms(schema)[::3]:
        reply = agents.ask("POST", path, {**body, "stream": True} if path == CHAT else body)
        assert reply.status == 400 and b"structured_outputs" in reply.body, (path, reply.body)
    offered = [tool("f", thing(p=schema)), tool("g", thing(a=DIGIT))]
    reply = agents.ask(
        "POST", CHAT, {**forms(schema)[0][1], "response_format": None, "tools": offered, "tool_choice": "required"}
    )
    assert reply.status == 400, reply.body


def test_tools_of_others_end_no_request(agents: Server) -> None:
    items = {"type": "array", "maxItems": 1, "uniqueItems": True}
    odd = {"type": "object", "properties": {"p": {**TEXT, "format": "path"}, "c": items}}
    body = {"model": "tools", "messages": ASKED, "max_tokens": 200, "seed": 2}
    offered = [tool("f", {"type": "object", "properties": {}}, strict=True), tool("g", odd)]
    for choice in ("auto", "required", {"type": "function", "function": {"name": "g"}}):
        reply = agents.ask("POST", CHAT, {**body, "tools": offered, "tool_choice": choice})
        assert reply.status == 200, reply.body
        assert {"tools.format", "tools.uniqueItems"} <= set(reply.headers[IGNORED].split(", "))


def test_a_named_tool_is_called_once(agents: Server) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    body = {"model": "tools", "messages": ASKED, "max_tokens": 400, "tools": [tool("f", OPEN)], "tool_choice": named}
    for seed in range(6):
        (choice,) = agents.ask("POST", CHAT, {**body, "seed": seed}).json["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert json.loads(call["function"]["arguments"]).keys() == {"a", "b"}
