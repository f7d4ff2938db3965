"""The server's answers are those of ``LLM``: tokens, log-probabilities, texts, in OpenAI's shapes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from enginewright import LLM, SamplingParams
from tests.runtime.server.conftest import Server

MESSAGES = [{"role": "user", "content": "Tell me of ships and the sea."}]


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


def request_of(rng: random.Random) -> dict[str, Any]:
    """Options of a request, over all that there is."""
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "return_token_ids": True}
    body |= rng.choice([{"temperature": 0}, {"temperature": rng.uniform(0.3, 1.5), "seed": rng.randrange(1 << 40)}])
    several = body["temperature"] > 0 and rng.random() < 0.25
    choices: list[dict[str, Any]] = [
        {"top_k": rng.randint(1, 50), "top_p": rng.uniform(0.3, 1.0)},
        {"frequency_penalty": rng.uniform(-1, 1), "presence_penalty": 0.5},
        {"repetition_penalty": 1.2, "min_p": 0.01},
        {"logit_bias": {"70": 5, "80": -100}, "min_tokens": 1},
        {"stop": ["e", "\n"], "include_stop_str_in_output": rng.random() < 0.5},
        {"allowed_token_ids": list(range(40, 120)), "ignore_eos": True},
        {},
    ]
    return body | rng.choice(choices) | ({"n": 2} if several else {})


def expected(llm: LLM, prompt: list[int], body: dict[str, Any]) -> list[list[int]]:
    """The library's answer to that prompt alone."""
    names = set(body) - {"return_token_ids", "stream"}
    fields = {name: body[name] for name in names}
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    (result,) = llm.generate([prompt], SamplingParams(**fields), progress=False)
    return [list(one.token_ids) for one in (result, *result.others)]


def tokens_of(server: Server, path: str, body: dict[str, Any]) -> list[list[int]]:
    reply = server.ask("POST", path, body)
    assert reply.status == 200, reply.body
    ids: dict[int, list[int]] = {}
    if body.get("stream"):
        for event in reply.events:
            for choice in event["choices"]:
                ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
    else:
        ids = {choice["index"]: choice["token_ids"] for choice in reply.json["choices"]}
    return [ids[index] for index in sorted(ids)]


def check_law(server: Server, llm: LLM, count: int, seed: int) -> None:
    rng = random.Random(seed)
    cases = []
    for _ in range(count):
        text = "".join(rng.choices("abc de. ", k=rng.randint(1, 60)))
        body = request_of(rng) | {"stream": rng.random() < 0.5}
        if rng.random() < 0.5:
            prompt = llm.tokenizer.encode(text)
            cases.append((prompt, body, "/v1/completions", {"prompt": rng.choice([text, prompt])}))
        else:
            messages = [{"role": "user", "content": text}]
            cases.append((llm.tokenizer.encode_chat(messages), body, "/v1/chat/completions", {"messages": messages}))
    with ThreadPoolExecutor(12) as pool:
        streams = list(pool.map(lambda case: tokens_of(server, case[2], case[1] | case[3]), cases))
    for (prompt, body, path, _), tokens in zip(cases, streams, strict=True):
        assert tokens == expected(llm, prompt, body), (path, body)


def test_the_law_holds_through_the_door(server: Server, llm: LLM) -> None:
    check_law(server, llm, 80, 1)


@pytest.mark.soak
def test_the_law_holds_through_the_door_for_500(server: Server, llm: LLM) -> None:
    check_law(server, llm, 500, 2)


def test_a_streamed_answer_is_the_whole_one(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny-llama", "messages": MESSAGES, "max_tokens": 24, "seed": 5}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    chunks = list(
        client.chat.completions.create(
            **options, logprobs=True, top_logprobs=3, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    entries = [e for c in chunks for one in c.choices if one.logprobs for e in one.logprobs.content or ()]
    assert whole.choices[0].logprobs is not None
    assert entries == whole.choices[0].logprobs.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert not chunks[-1].choices and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens  # the whole answer left them
    assert whole.system_fingerprint == chunks[0].system_fingerprint


def test_a_seed_that_nobody_named_is_told_and_fresh(server: Server) -> None:
    first, second = (server.chat("Hello", max_tokens=16).json for _ in range(2))
    seeds = [one["enginewright"]["seed"] for one in (first, second)]
    assert seeds[0] != seeds[1]
    again = server.chat("Hello", max_tokens=16, seed=seeds[0]).json
    assert again["choices"][0]["message"] == first["choices"][0]["message"]


def test_completions_echo_and_score(server: Server, llm: LLM) -> None:
    """lm-eval asks so for log-likelihoods."""
    prompt = llm.tokenizer.encode("A ship at sea")
    reply = server.complete([prompt, prompt[:4]], max_tokens=1, echo=True, logprobs=1, temperature=0, seed=1).json
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    (result,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=1, logprobs=1), progress=False)
    scored = reply["choices"][0]["logprobs"]
    assert result.prompt_logprobs is not None and result.logprobs is not None
    logprobs = [*(None if e is None else e.logprob for e in result.prompt_logprobs), result.logprobs[0].logprob]
    assert scored["token_logprobs"] == pytest.approx(logprobs, abs=0) and scored["token_logprobs"][0] is None
    assert "".join(scored["tokens"][: len(prompt)]) == "A ship at sea" and scored["text_offset"][:3] == [0, 1, 2]
    alone = server.complete(prompt, max_tokens=0, echo=True, logprobs=1).json
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == scored["token_logprobs"][:-1]
    assert alone["usage"]["completion_tokens"] == 0 and alone["choices"][0]["text"] == "A ship at sea"


def test_defaults_are_the_protocol_s(server: Server) -> None:
    assert server.complete("Hello", ignore_eos=True).json["usage"]["completion_tokens"] == 16
    chat = server.chat("Hello", ignore_eos=True).json
    assert chat["usage"]["total_tokens"] == server.ask("GET", "/v1/models").json["data"][0]["max_model_len"]
    assert chat["choices"][0]["finish_reason"] == "length"


def test_beams_and_the_best_of_several(server: Server, llm: LLM) -> None:
    ids = llm.tokenizer.encode("A ship")
    answer = server.complete(ids, num_beams=3, n=2, max_tokens=5, return_token_ids=True).json["choices"]
    (result,) = llm.generate([ids], SamplingParams(num_beams=3, n=2, max_tokens=5), progress=False)
    assert [one["token_ids"] for one in answer] == [list(one.token_ids) for one in (result, *result.others)]
    best = server.complete(ids, best_of=3, max_tokens=5, seed=4, return_token_ids=True).json["choices"]
    params = SamplingParams(best_of=3, temperature=1, seed=4, max_tokens=5)
    assert best[0]["token_ids"] == list(llm.generate(ids, params)[0].token_ids) and len(best) == 1
    assert server.complete(ids, num_beams=3, stream=True).status == 400


def test_models_and_tokens(server: Server, client: openai.OpenAI, llm: LLM) -> None:
    (row,) = client.models.list().data
    assert row.id == "tiny-llama" and client.models.retrieve("tiny-llama") == row
    ids = llm.tokenizer.encode("Hello there")
    reply = server.ask("POST", "/tokenize", {"prompt": "Hello there", "return_token_strs": True}).json
    assert reply["tokens"] == ids and reply["count"] == len(ids) == len(reply["token_strs"])
    chat = server.ask("POST", "/tokenize", {"messages": MESSAGES}).json
    assert chat["tokens"] == llm.tokenizer.encode_chat(MESSAGES)
    assert server.ask("POST", "/detokenize", {"tokens": ids}).json["prompt"] == "Hello there"


@pytest.mark.matrix
def test_a_conversation_goes_on_from_its_own_tokens(make_server: Callable[..., Server], turns_bundle: Path) -> None:
    """A tiny model writes bytes that aren't text: encoded again they would be other tokens."""
    server = make_server(turns_bundle)
    messages = [{"role": "user", "content": "A long question about ships, the sea, and the wind. " * 3}]
    for stream in (False, True):
        for seed in range(300):  # until an answer ends by itself, which a tiny model's rarely does
            body = {"max_tokens": 60, "seed": seed, "logit_bias": {"2": 4}, "return_token_ids": True, "stream": stream}
            reply = server.chat(messages, **body)
            choices = [c for event in reply.events for c in event["choices"]] if stream else reply.json["choices"]
            ids = [token for choice in choices for token in choice.get("token_ids", ())]
            if choices[-1]["finish_reason"] == "stop" and "\ufffd" in reply.text:
                break
        else:
            pytest.fail("no answer ended")
        later = [*messages, {"role": "assistant", "content": reply.text}, {"role": "user", "content": "Why?"}]
        second = server.chat(later, max_tokens=4, return_token_ids=True).json
        spliced = second["enginewright"]["spliced_tokens"]
        prompt = server.chat(messages, max_tokens=1, return_token_ids=True).json["prompt_token_ids"]
        assert second["prompt_token_ids"][:spliced] == [*prompt, *ids] and spliced == len(prompt) + len(ids)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= spliced - 1
        plain = server.chat(later, max_tokens=4, splice=False, return_token_ids=True).json
        assert plain["enginewright"]["spliced_tokens"] == 0
        assert plain["prompt_token_ids"] != second["prompt_token_ids"]
        tail = server.ask("POST", "/tokenize", {"prompt": "\n[user] Why?\n[assistant] ", "add_special_tokens": False})
        assert second["prompt_token_ids"][spliced:] == tail.json["tokens"]
        edited = [*messages, {"role": "assistant", "content": reply.text + "!"}, later[-1]]
        assert server.chat(edited, max_tokens=1).json["enginewright"]["spliced_tokens"] == 0


def test_what_is_said_of_the_model(server: Server) -> None:
    props = server.props()
    assert props["exact"] and "in any batch" in props["guarantee"] and props["target"] == "cpu"
    assert props["system_fingerprint"] == server.chat("Hi", max_tokens=1).json["system_fingerprint"]
    text = server.ask("GET", "/metrics").body.decode()
    for name in ("num_requests_running", "kv_cache_usage_perc", "prompt_tokens_total", "cache_config_info"):
        assert f"vllm:{name}" in text, name
    assert "enginewright_engine_ready" in text and "time_to_first_token_seconds_bucket" in text
    assert server.ask("GET", "/health").json["status"] == "ok" and server.ask("GET", "/ping").status == 200
    assert "/v1/chat/completions" in server.ask("GET", "/openapi.json").json["paths"]
