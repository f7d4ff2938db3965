"""Ollama's protocol: what there is, chat and generate in lines, and an honest 404 for what isn't served."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from enginewright.runtime.server.app import NOT_SERVED
from enginewright.runtime.server.protocols.ollama import GenerateBody, OllamaChatBody
from tests.runtime.server.conftest import Server


def test_what_there_is(server: Server, tiny_bundle: Path) -> None:
    (tag,) = server.ask("GET", "/api/tags").json["models"]
    (row,) = server.ask("GET", "/v1/models").json["data"]
    assert tag["name"] == tag["model"] == row["id"]
    assert "sha256:" + tag["digest"] == server.props()["bundle"]
    listed = sum(file.stat().st_size for file in tiny_bundle.rglob("*") if file.name != "manifest.json")
    assert 0 < tag["size"] <= listed
    assert tag["details"]["family"] == "llama" and tag["details"]["quantization_level"] == "f32"
    written = (tiny_bundle / "manifest.json").stat().st_mtime
    assert datetime.fromisoformat(tag["modified_at"]).timestamp() == pytest.approx(written, abs=1e-5)  # microseconds
    (loaded,) = server.ask("GET", "/api/ps").json["models"]
    assert loaded["digest"] == tag["digest"] and loaded["context_length"] == row["max_model_len"]


@pytest.mark.parametrize("body", [{"model": "tiny-llama"}, {"name": "tiny-llama:latest", "verbose": True}])
def test_what_is_known_of_a_model(server: Server, body: dict[str, object]) -> None:
    shown = server.ask("POST", "/api/show", body).json
    (row,) = server.ask("GET", "/v1/models").json["data"]
    assert shown["capabilities"] == ["completion"] and "messages" in shown["template"]
    assert shown["model_info"]["llama.context_length"] == row["max_model_len"]
    assert shown["model_info"]["general.parameter_count"] > 0 and shown["details"]["parameter_size"]


def test_only_loaded_models_are_listed_as_loaded(make_server: Callable[..., Server], tiny_bundle: Path) -> None:
    server = make_server("--model", f"a={tiny_bundle}", "--model", f"b={tiny_bundle}", "--max-loaded", "1")
    assert [one["name"] for one in server.ask("GET", "/api/tags").json["models"]] == ["a", "b"]
    assert [one["name"] for one in server.ask("GET", "/api/ps").json["models"]] == ["a"]


@pytest.mark.parametrize("path", NOT_SERVED)
def test_what_is_not_served_says_why(server: Server, path: str) -> None:
    reply = server.ask("POST", path, {"model": "tiny-llama", "input": "a"})
    assert reply.status == 404
    error = reply.json["error"]
    assert NOT_SERVED[path] in (error if path.startswith("/api/") else error["message"])


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "odd"}, 404, "model 'odd' not found"),
        ({}, 400, "model: it is missing"),
        ({"model": 3}, 400, "model: expected `str"),
        ({"model": "tiny-llama", "odd": 1}, 400, "odd"),
        (b"{", 400, "isn't JSON"),
    ],
)
def test_errors_have_ollama_s_shape(server: Server, body: object, status: int, said: str) -> None:
    reply = server.ask("POST", "/api/show", body)
    assert reply.status == status and said in reply.json["error"]


def test_a_method_that_is_not_taken_says_which_are(server: Server) -> None:
    for path, methods in (
        ("/v1/models", "GET, HEAD"),
        ("/v1/chat/completions", "POST"),
        ("/ping", "GET, HEAD, POST"),
        ("/v1/responses/none", "DELETE, GET, HEAD"),
        ("/v1/responses/input_tokens", "POST"),
    ):
        reply = server.ask("PUT", path)
        assert reply.status == 405 and sorted(reply.headers["allow"].split(", ")) == methods.split(", ")


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
SAID = [{"role": "user", "content": "Go"}]
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def lines(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    reply = server.ask("POST", path, body)
    assert reply.status == 200 and reply.headers["content-type"] == "application/x-ndjson", reply.body
    return [json.loads(line) for line in reply.body.splitlines()]


def said(rows: list[Any], name: str) -> Any:
    """The joined content of rows from /api/chat or /api/generate."""
    values = [one["message"].get(name) if "message" in one else one.get(name) for one in rows]
    values = [value for value in values if value]
    return [call for calls in values for call in calls] if name == "tool_calls" else "".join(values)


def both(server: Server, path: str, **body: Any) -> dict[str, Any]:
    """The whole answer, after a check that the streamed one is equal."""
    body = {"model": "tools", "options": {"num_predict": 200, "seed": 1}, **body}
    whole = server.ask("POST", path, body | {"stream": False})
    assert whole.status == 200, whole.body
    rows = lines(server, path, body)
    assert [one["done"] for one in rows] == [False] * (len(rows) - 1) + [True]
    for name in ("content", "response", "thinking", "tool_calls"):
        assert said(rows, name) == said([whole.json], name)
    for name in ("done_reason", "eval_count", "prompt_eval_count"):
        assert rows[-1][name] == whole.json[name]
    for name in TIMES:
        assert type(rows[-1][name]) is int and rows[-1][name] >= 0
    answer: dict[str, Any] = whole.json
    assert answer["total_duration"] >= answer["eval_duration"] + answer["prompt_eval_duration"]
    return answer


def test_chat(agents: Server) -> None:
    answer = both(agents, "/api/chat", messages=SAID, options={"num_predict": 9, "seed": 1})
    assert answer["message"]["content"] and answer["done_reason"] == "length" and answer["eval_count"] == 9
    assert answer["model"] == "tools" and datetime.fromisoformat(answer["created_at"])
    assert both(agents, "/api/chat", messages=SAID, model="tools:latest")["model"] == "tools:latest"


def test_chat_with_tools(agents: Server) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    turn = [*SAID, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "tool_name": "weather", "content": "sun"}
    answer = both(agents, "/api/chat", messages=[*turn, result], tools=[WEATHER], options={"num_predict": 3, "seed": 1})
    counted = agents.ask("POST", "/tokenize", {"messages": [*turn, result | {"name": "weather"}], "tools": [WEATHER]})
    assert answer["prompt_eval_count"] == counted.json["count"]


def test_the_form_and_the_reasoning_of_an_answer(agents: Server) -> None:
    answer = both(agents, "/api/chat", messages=SAID, format={"enum": ["a", "b"]})
    assert answer["message"]["content"].strip() in ('"a"', '"b"') and answer["done_reason"] == "stop"
    counts = [
        both(agents, "/api/chat", model="thinking", messages=SAID, think=think, options={"num_predict": 1, "seed": 1})
        for think in (False, True)
    ]
    assert counts[0]["prompt_eval_count"] > counts[1]["prompt_eval_count"]
    shown = [agents.ask("POST", "/api/show", {"model": name}).json["capabilities"] for name in ("tools", "thinking")]
    assert shown == [["completion", "tools"], ["completion", "thinking"]]


def test_generate(agents: Server) -> None:
    options = {"num_predict": 9, "seed": 1, "temperature": 0}
    answer = both(agents, "/api/generate", prompt="Go", system="Be", options=options)
    assert answer["response"] and "message" not in answer
    messages = [{"role": "system", "content": "Be"}, *SAID]
    assert both(agents, "/api/chat", messages=messages, options=options)["message"]["content"] == answer["response"]
    raw = both(agents, "/api/generate", prompt="Go", raw=True, options=options)
    assert raw["prompt_eval_count"] < answer["prompt_eval_count"]
    plain = agents.complete("Go", model="tools", temperature=0, max_tokens=9)
    assert plain.text == raw["response"]


def test_the_options_of_ollama_s_own_examples(agents: Server) -> None:
    """https://github.com/ollama/ollama/blob/main/docs/api.md, "Request (with options)", and of older versions."""
    options = {
        **{"num_keep": 5, "seed": 42, "num_predict": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "tfs_z": 0.5},
        **{"typical_p": 0.7, "repeat_last_n": 33, "temperature": 0.8, "repeat_penalty": 1.2, "presence_penalty": 1.5},
        **{"frequency_penalty": 1.0, "mirostat": 1, "mirostat_tau": 0.8, "mirostat_eta": 0.6},
        **{"penalize_newline": True, "stop": ["\n", "user:"], "numa": False, "num_ctx": 1024, "num_batch": 2},
        **{"num_gpu": 1, "main_gpu": 0, "low_vram": False, "vocab_only": False, "use_mmap": True},
        **{"use_mlock": False, "num_thread": 8},
    }
    body = {"model": "tools", "prompt": "Why?", "stream": False, "options": options}
    reply = agents.ask("POST", "/api/generate", body)
    assert reply.status == 200 and reply.json["done"]
    named = reply.headers["x-enginewright-ignored"].split(", ")
    assert {"options.repeat_last_n", "options.mirostat", "options.num_ctx"} <= set(named)
    assert not {"options.repeat_penalty", "options.top_k"} & set(named)
    example = {"model": "tools", "messages": [{"role": "user", "content": "x"}], "stream": False, "truncate": True}
    reply = agents.ask("POST", "/api/chat", example | {"options": {"num_predict": 3.0, "repeat_last_n": None}})
    assert reply.status == 200 and reply.headers["x-enginewright-ignored"] == "truncate"
    raw = {"model": "tools", "prompt": "x", "stream": False, "raw": True, "system": "", "think": False}
    assert agents.ask("POST", "/api/generate", raw | {"options": {"num_predict": 3}}).status == 200


def test_no_last_tokens_are_penalised(agents: Server) -> None:
    body = {"model": "tools", "prompt": "Why?", "stream": False}
    plain = {"num_predict": 12, "temperature": 0}
    penalised = plain | {"repeat_penalty": 1.9, "frequency_penalty": 1.9}
    answers = [
        agents.ask("POST", "/api/generate", body | {"options": options}).json["response"]
        for options in (plain, penalised, penalised | {"repeat_last_n": 0})
    ]
    assert answers[0] == answers[2] != answers[1]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_model_is_loaded_by_asking_for_nothing(agents: Server, path: str) -> None:
    answer = agents.ask("POST", path, {"model": "tools"}).json
    assert answer["done"] and answer["done_reason"] == "load"


@pytest.mark.parametrize(
    ("path", "more", "status", "said"),
    [
        ("/api/chat", {"model": "odd"}, 404, "model 'odd' not found"),
        ("/api/chat", {"odd": 1}, 400, "'odd': there is no such field"),
        ("/api/chat", {"options": {"odd": 1}}, 400, "options: there is no 'odd'"),
        ("/api/chat", {"options": {"temperature": "x"}}, 400, "temperature: expected"),
        ("/api/chat", {"options": {"dry_multiplier": -1}}, 400, "options.dry_multiplier: -1"),
        ("/api/chat", {"options": {"repeat_penalty": -1}}, 400, "options.repeat_penalty: -1"),
        ("/api/chat", {"format": "xml"}, 400, "format: 'xml' isn't a form"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, 400, "images"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "a" * 2000}]},
            400,
            "the input length exceeds the context length",
        ),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "tools does not support insert"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "raw"),
    ],
)
def test_a_body_that_is_wrong(agents: Server, path: str, more: dict[str, Any], status: int, said: str) -> None:
    body = {"model": "tools"} | ({"messages": SAID} if path == "/api/chat" else {}) | more
    for stream in (False, True):
        reply = agents.ask("POST", path, body | {"stream": stream})
        assert reply.status == status and list(reply.json) == ["error"] and said in reply.json["error"], reply.body


def test_options_that_change_nothing_are_named(agents: Server) -> None:
    body = {"model": "tools", "messages": SAID, "stream": False, "keep_alive": "5m"}
    reply = agents.ask("POST", "/api/chat", body | {"options": {"num_ctx": 4096, "num_predict": 1}})
    assert reply.headers["x-enginewright-ignored"] == "keep_alive, options.num_ctx"


def test_the_three_tables_are_apart() -> None:
    for kind in (OllamaChatBody, GenerateBody):
        names = {*kind.__struct_fields__}
        assert not names & set(kind.refused) and not names & kind.harmless and not set(kind.refused) & kind.harmless


@pytest.mark.parametrize("body", [{"prompt": "a"}, {}])
def test_without_a_model_s_name_the_first_answers(server: Server, body: dict[str, object]) -> None:
    reply = server.ask("POST", "/api/generate", {**body, "stream": False, "options": {"num_predict": 2}})
    assert reply.status == 200 and reply.json["done"] and reply.json["model"] == "tiny-llama"
