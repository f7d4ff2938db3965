"""Every option that OpenAI's client has, and every one that a body may have, through that client: sync and async,
streamed and whole, which must agree. A new option of either fails here until it is in one of the tables."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from enginewright import LLM
from enginewright.runtime.server.protocols.bodies import HARMLESS, REFUSED, ChatBody, CompletionBody
from tests.runtime.server.conftest import Server

Answer = dict[str, Any]
"""The parts of one choice: its text, finish_reason, and tokens of its log-probabilities."""
Check = Callable[[list[Answer], list[Answer]], bool]
"""Returns True if the answers with an option are right, given those without it."""

MESSAGES = [{"role": "user", "content": "Tell me of ships."}]
BASE = {"seed": 5, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


def other(found: list[Answer], base: list[Answer]) -> bool:
    return found[0]["text"] != base[0]["text"]


def same(found: list[Answer], base: list[Answer]) -> bool:
    return found == base


def length(count: int) -> Check:
    return lambda found, base: found[0]["text"] == base[0]["text"][:count] and found[0]["finish"] == "length"


def scored(count: int) -> Check:
    return lambda found, base: found[0]["text"] == base[0]["text"] and len(found[0]["tokens"]) == count


def one_of(*texts: str) -> Check:
    return lambda found, base: found[0]["text"] in texts and found[0]["finish"] == "stop"


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"const": [1]}}}

BOTH: dict[str, tuple[dict[str, Any], Check]] = {
    # option -> what is sent besides BASE, and what must come of it
    "frequency_penalty": ({"frequency_penalty": 1.9}, other),
    "presence_penalty": ({"presence_penalty": 1.9}, other),
    "logit_bias": ({"logit_bias": {"70": 100}}, lambda found, base: len(set(found[0]["text"])) == 1),
    "max_tokens": ({"max_tokens": 3}, lambda found, base: base[0]["text"].startswith(found[0]["text"])),
    "n": ({"n": 3}, lambda found, base: len(found) == 3 and len({one["text"] for one in found}) > 1),
    "seed": ({"seed": 6}, other),
    "stop": ({"stop": ["e", "a", "i", "o"]}, lambda found, base: not {*found[0]["text"]} & {*"eaio"}),
    "temperature": ({"temperature": 0.01}, other),
    "top_p": ({"top_p": 0.01}, other),
    "model": ({"model": "tiny-llama"}, same),
    "stream_options": ({}, same),  # sent with every stream
    "stream": ({}, same),
}
CHAT: dict[str, tuple[dict[str, Any], Check]] = {
    "messages": ({"messages": [*MESSAGES, {"role": "assistant", "content": "No."}, *MESSAGES]}, other),
    "max_completion_tokens": ({"max_completion_tokens": 3}, BOTH["max_tokens"][1]),
    "logprobs": ({"logprobs": True}, scored(24)),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 4}, scored(24)),
    "response_format": (
        {"response_format": JSON_SCHEMA, "extra_body": {"ignore_eos": False}},
        lambda found, base: found[0]["text"].split() in (["[1]"], ["[", "1]"], ["[1", "]"], ["[", "1", "]"]),
    ),
    "tools": ({"tools": []}, same),
    "tool_choice": ({"tool_choice": "none"}, same),
    "parallel_tool_calls": ({"parallel_tool_calls": True}, same),
    "reasoning_effort": ({"reasoning_effort": "low"}, same),
}
COMPLETIONS: dict[str, tuple[dict[str, Any], Check]] = {
    "prompt": ({"prompt": [5, 6, 7]}, other),
    "echo": ({"echo": True}, lambda found, base: found[0]["text"] == "Ships " + base[0]["text"]),
    "logprobs": ({"logprobs": 2}, scored(24)),
    "best_of": ({"best_of": 1}, same),
    "suffix": ({"suffix": ""}, same),  # what it does: test_infill.py
}
EXTRA: dict[str, tuple[dict[str, Any], Check]] = {
    # not the client's: sent as extra_body
    "top_k": ({"top_k": 1}, other),
    "min_p": ({"min_p": 0.99}, other),
    "typical_p": ({"typical_p": 0.01}, other),
    "top_n_sigma": ({"top_n_sigma": 0.01}, other),
    "xtc_probability": ({"xtc_probability": 1.0, "xtc_threshold": 0.0}, other),
    "dry_multiplier": (
        {"dry_multiplier": 50.0, "dry_allowed_length": 0, "dry_penalty_last_n": -1, "dry_sequence_breakers": []},
        other,
    ),
    # Parts of XTC and DRY, which are off without the others
    "xtc_threshold": ({"xtc_threshold": 0.0}, same),
    "dry_base": ({"dry_base": 3.0}, same),
    "dry_allowed_length": ({"dry_allowed_length": 0}, same),
    "dry_penalty_last_n": ({"dry_multiplier": 50.0, "dry_allowed_length": 0, "dry_penalty_last_n": 0}, same),
    "dry_sequence_breakers": ({"dry_sequence_breakers": ["e"]}, same),
    "repetition_penalty": ({"repetition_penalty": 1.9}, other),
    "allowed_token_ids": ({"allowed_token_ids": [70]}, lambda found, base: len(set(found[0]["text"])) == 1),
    "bad_words": ({"bad_words": ["e"]}, lambda found, base: "e" not in found[0]["text"]),
    "stop_token_ids": (
        {"stop_token_ids": [*range(3, 259)]},
        lambda found, base: found[0]["finish"] == "stop" and len(found[0]["text"]) <= 1,
    ),
    "include_stop_str_in_output": (
        {"stop": ["e", "a", "i", "o", "u"], "include_stop_str_in_output": True},
        lambda found, base: found[0]["finish"] == "length" or found[0]["text"][-1] in "eaiou",
    ),
    "ignore_eos": ({"ignore_eos": True}, same),
    "min_tokens": ({"min_tokens": 24, "ignore_eos": False}, lambda found, base: found[0]["finish"] == "length"),
    "skip_special_tokens": ({"skip_special_tokens": True}, same),
    "return_token_ids": ({"return_token_ids": True}, lambda found, base: len(found[0]["ids"]) == 24),
    "return_tokens_as_token_ids": ({"return_tokens_as_token_ids": True}, same),
    "cache_salt": ({"cache_salt": "a"}, same),
    "speculate": ({"speculate": False}, same),
    "structured_outputs": ({"structured_outputs": {"choice": ["ab", "ac"]}, "ignore_eos": False}, one_of("ab", "ac")),
    "json_schema": ({"json_schema": {"const": "ab"}, "ignore_eos": False}, one_of('"ab"')),
    "guided_json": ({"guided_json": {"const": 7}, "ignore_eos": False}, one_of("7")),
    "guided_regex": (
        {"guided_regex": "[xyz]{3}", "ignore_eos": False},
        lambda found, base: {*found[0]["text"]} <= {*"xyz"},
    ),
    "guided_choice": ({"guided_choice": ["ab"], "ignore_eos": False}, one_of("ab")),
    "guided_grammar": ({"guided_grammar": 'start: "ab"', "ignore_eos": False}, one_of("ab")),
    "guided_json_object": ({"guided_json_object": True}, lambda found, base: found[0]["text"].lstrip()[0] == "{"),
}
EXTRA_CHAT: dict[str, tuple[dict[str, Any], Check]] = {
    "add_generation_prompt": ({"add_generation_prompt": False}, other),
    "continue_final_message": (
        {"continue_final_message": True, "messages": [*MESSAGES, {"role": "assistant", "content": "No"}]},
        other,
    ),
    "chat_template_kwargs": ({"chat_template_kwargs": {}}, same),
    "echo": ({"echo": True}, lambda found, base: found[0]["text"].endswith(base[0]["text"]) and other(found, base)),
    "splice": ({"splice": False}, same),
    "include_reasoning": ({"include_reasoning": False}, same),  # it has none
    "enable_thinking": ({"enable_thinking": False}, same),  # the template doesn't read it
    "think": ({"think": True}, same),
    "thinking_token_budget": ({"thinking_token_budget": 3}, same),  # of reasoning, which it has none of
    "thinking": ({"thinking": {"type": "disabled"}}, same),
    "reasoning": ({"reasoning": {"effort": "low"}}, same),
}
EXTRA_COMPLETIONS: dict[str, tuple[dict[str, Any], Check]] = {
    "add_special_tokens": ({"add_special_tokens": False}, same),  # the tiny model's tokenizer adds none
}
SCHEDULED = {"priority": 1, "request_class": "interactive"}
"""Taken where the server runs requests by them, refused where it doesn't."""
WHOLE: dict[str, dict[str, Any]] = {
    # known at an answer's end alone; streamed they are refused, or given at the end
    "num_beams": {"num_beams": 3},
    "length_penalty": {"num_beams": 3, "length_penalty": 0.5},
    "early_stopping": {"num_beams": 3, "early_stopping": True},
    "prompt_logprobs": {"prompt_logprobs": 1},
}
REFUSED_VALUES: dict[str, Any] = {
    "audio": {"format": "wav", "voice": "alloy"},
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "web_search_options": {},
}
HARMLESS_VALUES: dict[str, Any] = {
    "metadata": {"a": "b"},
    "moderation": {"model": "m"},
    "prediction": {"type": "content", "content": "a"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "in_memory",
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": False,
    "user": "u",
    "verbosity": "low",
}
NOT_OPTIONS = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


def test_two_names_are_one_engine(make_server: Callable[..., Server], tiny_bundle: Path) -> None:
    running = make_server("--model", f"chat={tiny_bundle}", "--alias", "gpt-4o-mini=chat", "--alias", "claude-x=chat")
    assert len(running.engines()) == 1
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        assert [one.id for one in client.models.list()] == ["chat", "gpt-4o-mini", "claude-x"]
        assert client.models.retrieve("gpt-4o-mini").id == "gpt-4o-mini"
        answers = [
            client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=4, seed=3)
            for name in ("chat", "gpt-4o-mini")
        ]
        assert [one.model for one in answers] == ["chat", "gpt-4o-mini"]
        assert answers[0].choices == answers[1].choices
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as other:
        page = other.models.list(limit=2)
        assert [one.id for one in page.data] == ["chat", "gpt-4o-mini"] and page.has_more
        assert [one.id for one in other.models.list(limit=1)] == ["chat", "gpt-4o-mini", "claude-x"]
        assert [one.id for one in other.models.list(before_id="claude-x", limit=1).data] == ["gpt-4o-mini"]
        model = other.models.retrieve("claude-x")
        assert (model.type, model.display_name, model.created_at.tzinfo is not None) == ("model", "claude-x", True)
        with pytest.raises(anthropic.NotFoundError) as failed:
            other.models.retrieve("claude-y")
        assert failed.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        with pytest.raises(anthropic.BadRequestError, match="after_id"):
            other.models.list(after_id="odd")
        message = other.messages.create(model="claude-x", messages=MESSAGES, max_tokens=2)  # type: ignore[arg-type]
        assert message.model == "claude-x"
    names = [one["name"] for one in running.ask("GET", "/api/tags").json["models"]]
    assert names == ["chat", "gpt-4o-mini", "claude-x"]
    body = {"model": "gpt-4o-mini:latest", "messages": MESSAGES, "stream": False, "options": {"num_predict": 2}}
    assert running.ask("POST", "/api/chat", body).status == 200


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


def endpoint(client: Any, kind: str) -> Any:
    return client.chat.completions if kind == "chat" else client.completions


def arguments(kind: str, **options: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES} if kind == "chat" else {"prompt": "Ships "}
    extra = {**BASE["extra_body"], **options.pop("extra_body", {})}  # type: ignore[dict-item]
    if "messages" in extra:
        options["messages"] = extra.pop("messages")
    return {"model": "tiny-llama", **body, **BASE, **options, "extra_body": extra}


def collected(chunks: list[Any]) -> list[Answer]:
    """The answers of a stream, or of a whole response as its only piece."""
    answers: dict[int, Answer] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            one = answers.setdefault(choice.index, {"text": "", "finish": None, "tokens": [], "ids": []})
            part = getattr(choice, "delta", None) or getattr(choice, "message", None)
            one["text"] += (choice.text if part is None else part.content) or ""
            one["finish"] = choice.finish_reason or one["finish"]
            one["ids"] += getattr(choice, "token_ids", None) or []
            if choice.logprobs is not None:
                content = getattr(choice.logprobs, "content", None)
                one["tokens"] += choice.logprobs.tokens if content is None else [entry.token for entry in content]
    return [answers[index] for index in sorted(answers)]


def whole(client: openai.OpenAI, kind: str, **options: Any) -> list[Answer]:
    return collected([endpoint(client, kind).create(**arguments(kind, **options))])


def streamed(client: openai.OpenAI, kind: str, **options: Any) -> list[Answer]:
    usage = {"include_usage": True, "include_obfuscation": False}
    options_of = arguments(kind, **options) | {"stream": True, "stream_options": usage}
    chunks = list(endpoint(client, kind).create(**options_of))
    assert chunks[-1].usage is not None and not chunks[-1].choices
    return collected(chunks)


def both_async(server: Server, kind: str, **options: Any) -> tuple[list[Answer], list[Answer]]:
    """Asks at the same time: whole, and streamed."""

    async def ask() -> tuple[list[Answer], list[Answer]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            arguments_of = arguments(kind, **options)

            async def stream() -> list[Answer]:
                return collected(
                    [chunk async for chunk in await endpoint(client, kind).create(**arguments_of, stream=True)]
                )

            async def at_once() -> list[Answer]:
                return collected([await endpoint(client, kind).create(**arguments_of)])

            first, second = await asyncio.gather(at_once(), stream())
            return first, second

    return asyncio.run(ask())


OPTIONS = [
    *(("chat", name, option) for name, option in (BOTH | CHAT).items()),
    *(("completions", name, option) for name, option in (BOTH | COMPLETIONS).items()),
    *(("chat", name, ({"extra_body": o[0]}, o[1])) for name, o in (EXTRA | EXTRA_CHAT).items()),
    *(("completions", name, ({"extra_body": o[0]}, o[1])) for name, o in (EXTRA | EXTRA_COMPLETIONS).items()),
]


@pytest.mark.parametrize(("kind", "name", "option"), OPTIONS, ids=[f"{kind}-{name}" for kind, name, _ in OPTIONS])
def test_an_option_does_what_it_says_in_every_way(
    server: Server, client: openai.OpenAI, kind: str, name: str, option: tuple[dict[str, Any], Check]
) -> None:
    options, check = option
    answers = whole(client, kind, **options)
    base = whole(client, kind)
    assert [streamed(client, kind, **options), *both_async(server, kind, **options)] == [answers] * 3
    if "return_token_ids" not in options.get("extra_body", {}):
        assert answers[0]["ids"] == []
    assert check(answers, base), (answers, base)


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize("name", WHOLE)
def test_what_is_known_at_the_end(server: Server, client: openai.OpenAI, kind: str, name: str) -> None:
    options = {"temperature": 0, "extra_body": WHOLE[name]}
    answers = whole(client, kind, **options)
    assert answers[0]["text"] and both_async(server, kind, temperature=0)[0]
    response = endpoint(client, kind).create(**arguments(kind, **options))
    assert (getattr(response, "prompt_logprobs", None) is not None) == (name == "prompt_logprobs")
    if name != "prompt_logprobs":
        with pytest.raises(openai.BadRequestError, match="num_beams"):
            streamed(client, kind, **options)


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize("name", SCHEDULED)
def test_who_runs_first(client: openai.OpenAI, kind: str, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match="serves first come, first served") as caught:
        whole(client, kind, extra_body={name: SCHEDULED[name]})
    assert caught.value.param == name


def test_who_runs_first_where_that_is_asked(
    make_server: Callable[..., Server], tiny_bundle: Path, client: openai.OpenAI
) -> None:
    by_priority = make_server(tiny_bundle, "--scheduling", "priority")
    for kind in ("chat", "completions"):
        with openai.OpenAI(base_url=f"{by_priority.url}/v1", api_key="none", max_retries=0) as asking:
            answers = whole(asking, kind, extra_body={"priority": 1})
            assert answers == whole(client, kind) == streamed(asking, kind, extra_body={"priority": 1})


def test_several_prompts(client: openai.OpenAI) -> None:
    answers = whole(client, "completions", prompt=["Ships ", "Seas "], n=2)
    assert [one["text"] for one in answers[:2]] == [one["text"] for one in whole(client, "completions", n=2)]
    assert answers == streamed(client, "completions", prompt=["Ships ", "Seas "], n=2) and len(answers) == 4


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_what_is_refused_names_itself(client: openai.OpenAI, name: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            endpoint(client, "chat").create(**arguments("chat", **{name: REFUSED_VALUES[name]}), stream=stream)
        assert caught.value.param == name and caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("name", HARMLESS_VALUES)
def test_what_is_harmless_is_named(client: openai.OpenAI, name: str) -> None:
    kinds = ("chat", "completions") if name == "user" else ("chat",)
    for kind in kinds:
        arguments_of = arguments(kind, **{name: HARMLESS_VALUES[name]})
        response = endpoint(client, kind).with_raw_response.create(**arguments_of)
        assert response.headers["x-enginewright-ignored"] == name
        assert collected([response.parse()]) == whole(client, kind)


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_no_option_is_left_out(client: openai.OpenAI, kind: str) -> None:
    """Neither of the client's nor of ours."""
    chat = kind == "chat"
    names = {*BOTH, *(CHAT if chat else COMPLETIONS)}
    parameters = {*inspect.signature(endpoint(client, kind).create).parameters} - NOT_OPTIONS
    assert parameters == (parameters & (names | {*REFUSED_VALUES} | {*HARMLESS_VALUES}))
    fields = {*(ChatBody if chat else CompletionBody).__struct_fields__}
    names |= set() if chat else {"response_format"}  # which OpenAI's completions don't have
    assert fields == names | {*EXTRA} | {*(EXTRA_CHAT if chat else EXTRA_COMPLETIONS)} | {*WHOLE, *SCHEDULED}
    assert {*REFUSED_VALUES} <= {*REFUSED} and {*HARMLESS_VALUES} <= HARMLESS


def test_models_and_errors(client: openai.OpenAI, server: Server) -> None:
    (row,) = client.models.list().data
    assert client.models.retrieve(row.id) == row
    for ask in (lambda: client.models.retrieve("odd"), lambda: whole(client, "chat", model="odd")):
        with pytest.raises(openai.NotFoundError, match="The model `odd` does not exist") as caught:
            ask()
        assert (caught.value.code, caught.value.type) == ("model_not_found", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 512 tokens") as caught:
        whole(client, "chat", messages=[{"role": "user", "content": "a" * 2000}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match="is of the kind 'generate', and this is for 'embed'"):
        client.embeddings.create(model=row.id, input="a")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        whole(client, "chat", max_tokens=0)


def test_a_tokenizer_is_told(server: Server, tiny_bundle: Path) -> None:
    """The response is vLLM's; lm-eval then needs no tokenizer of its own."""
    info = server.ask("GET", "/tokenizer_info").json
    with LLM(tiny_bundle) as llm:
        assert llm.tokenizer is not None
        assert info["chat_template"] == llm.tokenizer.chat_templates["default"]
        assert llm.tokenizer.encode(info["eos_token"], add_special_tokens=False) == [2]
    assert server.ask("GET", "/tokenizer_info?model=odd").status == 404


def test_tokens_by_the_names_of_llama_cpp(server: Server) -> None:
    text = "a\u00e9"
    tokens = server.ask("POST", "/tokenize", {"content": text}).json["tokens"]
    pieces = server.ask("POST", "/tokenize", {"content": text, "with_pieces": True}).json["tokens"]
    assert [one["id"] for one in pieces] == tokens
    assert [one["piece"] for one in pieces] == ["a", [0xC3], [0xA9]]
    assert server.ask("POST", "/tokenize", {"content": text, "add_special": True}).json["tokens"] == tokens
    assert server.ask("POST", "/detokenize", {"tokens": tokens}).json["content"] == text
