"""Bodies with a value of another type somewhere in them, sent to the application without a socket.

    python -m tests.runtime.server.type_confusion BUNDLE --embed BUNDLE --rerank BUNDLE --classify BUNDLE
        --token-classify BUNDLE [--count 100000] [--seed 1] [--json FILE]

Each body is a rich one of its protocol, in which places at random are replaced: by each type of JSON, by numbers that
fit nowhere, by lone surrogates, by lists of thousands of levels. Every answer must be 200, a 4xx in the protocol's
shape, or 503 that says when to ask again.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.runtime.server.conftest import Reply
from tests.runtime.server.in_process import InProcess
from tests.text_models import CLASSES

_DEEP, _HUGE = "deep value", "huge number"  # stand for what Python can't write as JSON
_TOOL = {
    "name": "f",
    "description": "D",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
}
_FUNCTION = {"type": "function", "function": _TOOL}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_SAID = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": [{"type": "text", "text": "U"}]},
    {"role": "assistant", "content": None, "reasoning_content": "R", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "1", "name": "f", "content": "T"},
    {"role": "user", "content": "V"},
]
_SAMPLING = {
    **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "n": 1, "frequency_penalty": 0.1},
    **{"stop": ["x"], "stop_token_ids": [5], "logit_bias": {"5": 1}, "allowed_token_ids": [70, 71], "bad_words": ["q"]},
    **{
        "stream": False,
        "stream_options": {"include_usage": True},
        "max_tokens": 1,
        "min_tokens": 0,
    },
    **{"repetition_penalty": 1.1, "presence_penalty": 0.1, "typical_p": 0.9, "ignore_eos": True, "cache_salt": "c"},
}
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "U", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "R", "signature": ""},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "b"}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "T"}]}],
    },
]
_MESSAGES = {
    "messages": _BLOCKS,
    "system": [{"type": "text", "text": "S"}],
    "tools": [{"name": "f", "description": "D", "input_schema": _TOOL["parameters"]}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
}
_ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "namespace": "s", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "T"}]},
    {"type": "custom_tool_call", "call_id": "2", "name": "c", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "2", "output": "y"},
]
_RESPONSES = {
    "input": _ITEMS,
    "instructions": "I",
    "tools": [
        {"type": "function", **_TOOL, "strict": True},
        {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]"}},
        {"type": "namespace", "name": "s", "tools": [{"type": "function", **_TOOL}]},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": _SAID, "tools": [_FUNCTION], "tool_choice": "auto", **_SAMPLING}),
    (
        "/v1/chat/completions",
        {
            "messages": _SAID[-1:],
            "max_completion_tokens": 1,
            "logprobs": True,
            "top_logprobs": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
            "chat_template_kwargs": {},
            "reasoning_effort": "low",
            "user": "u",
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": _SAID[-1:], "max_tokens": 1, "structured_outputs": {"choice": ["a", "b"], "regex": None}},
    ),
    ("/v1/completions", {"prompt": ["a", [70, 71]], "logprobs": 1, "echo": True, "best_of": 1, **_SAMPLING}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1, "guided_json": _SCHEMA}),
    ("/v1/completions", {"prompt": [70, 71], "max_tokens": 1, "guided_choice": ["a", "b"], "prompt_logprobs": 1}),
    ("/v1/messages", {"max_tokens": 1, **_MESSAGES}),
    ("/v1/messages/count_tokens", _MESSAGES),
    ("/v1/responses", {"max_output_tokens": 1, "metadata": {"a": "b"}, "include": [], "store": True, **_RESPONSES}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 1, "previous_response_id": "resp_0", "tools": []}),
    ("/v1/responses/input_tokens", _RESPONSES),
    (
        "/api/chat",
        {
            **{
                "model": "m",
                "messages": _SAID,
                "tools": [_FUNCTION],
                "stream": False,
                "think": False,
                "format": _SCHEMA,
            },
            **{"keep_alive": 1, "options": {"num_predict": 1, "stop": ["x"], "temperature": 0.5, "repeat_last_n": -1}},
        },
    ),
    (
        "/api/generate",
        {"model": "m", "prompt": "a", "system": "S", "stream": False, "raw": False, "options": {"num_predict": 1}},
    ),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "prompt": "c", "input_extra": [], "n_predict": 1}),
    ("/api/show", {"model": "m", "name": "m", "verbose": True}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": True, "return_token_strs": True, "with_pieces": True}),
    ("/tokenize", {"messages": _SAID, "tools": [_FUNCTION], "chat_template_kwargs": {}}),
    ("/detokenize", {"tokens": [70, 71]}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 32, "truncate": True}),
    ("/v1/embeddings", {"input": [[10, 11], [12]], "normalize": False, "prompt_name": "query", "user": "u"}),
    ("/embed", {"inputs": ["a"], "normalize": True, "truncate": False, "input_type": "query"}),
    ("/api/embed", {"input": ["a"], "truncate": True, "options": {"num_ctx": 8}, "keep_alive": 1}),
    ("/api/embeddings", {"prompt": "a"}),
    *(
        (path, {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True})
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    ("/rerank", {"query": "a", "texts": ["b", "c"], "return_text": True, "raw_scores": True}),
    *((path, {"text_1": "a", "text_2": ["b", "c"]}) for path in ("/score", "/v1/score")),
    *((path, {"input": ["a", "b"], "priority": 0}) for path in ("/classify", "/v1/classify")),
    ("/predict", {"inputs": [["a"], ["b", "c"]], "raw_scores": False, "truncate": False}),
    ("/pooling", {"input": ["a", "b"], "encoding_format": "base64", "use_activation": False}),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 7, 0.5, -0.5, 1e300, 1 << 31, 1 << 63, -(1 << 63), 1 << 64, 1 << 70, _HUGE, _DEEP),
    *("", "x", "7", "a" * 3000, "\0", "\r\nx-odd: 1", "\ud800", "a\udfff", "\U0001f600", "</s>", "type", "function"),
    *([], [[]], [None], ["a"], [1], [{}], [[[[]]]], [1 << 70], [_DEEP], {}, {"": {}}, {"a": []}, {"type": []}),
    *(
        {"type": {}},
        {"type": "function"},
        {"name": []},
        {"\ud800": 1},
        {"a": 1 << 70},
        ["a", 1, None, [], {}],
        [0.5] * 300,
    ),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each object or list within a value, with each of its keys or places."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


def body(rng: random.Random) -> tuple[str, bytes]:
    """A path, and a body of its protocol with values of other types."""
    path, valid = rng.choice(BODIES)
    confused = copy.deepcopy(valid)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        spots = [*places(confused)]
        if not spots:
            break
        holder, key = rng.choice(spots)
        how = rng.random()
        if how < 0.8:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif how < 0.9:
            holder[key] = rng.choice(([holder[key]], {"a": holder[key]}, json.dumps(holder[key])))
        elif isinstance(holder, dict):
            del holder[key]
        else:
            holder += [holder[key]] * rng.choice((1, 3, 200))
    text = json.dumps(confused)
    levels = rng.choice((50, 200, 5_000))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
    number = rng.choice(("1", "-1", "1.", "1e")) + "9" * rng.choice((30, 390, 9000))
    text = text.replace(json.dumps(_DEEP), opening * levels + "1" + closing * levels)
    return path, text.replace(json.dumps(_HUGE), number).encode()


def check(path: str, data: bytes, reply: Reply) -> None:
    """Fails for an answer that isn't one of those that there may be."""
    shown = (path, data[:2000], reply.status, reply.body[:500])
    assert reply.status == 200 or 400 <= reply.status < 500 or "retry-after" in reply.headers, shown
    assert reply.status < 500 or reply.status == 503, shown
    assert all(len(value) <= 1100 and name != "x-odd" for name, value in reply.headers.items()), (shown, reply.headers)
    if reply.status == 200:
        return
    problem = json.loads(reply.body)
    if path.startswith("/api/"):
        assert {*problem} == {"error"} and isinstance(problem["error"], str) and problem["error"], shown
    elif path.startswith("/v1/messages"):
        assert problem["type"] == "error" and {*problem["error"]} == {"type", "message"}, shown
    else:
        assert {*problem["error"]} == {"message", "type", "param", "code"} and problem["error"]["message"], shown


async def confuse(app: InProcess, count: int, seed: int, at_once: int = 16) -> Counter[int]:
    """Sends bodies, and returns how often each status came."""
    statuses: Counter[int] = Counter()
    numbers = iter(range(count))

    async def send() -> None:
        for number in numbers:
            path, data = body(random.Random(f"{seed} {number}"))
            reply = await app.ask(path, data)
            check(path, data, reply)
            statuses[reply.status] += 1
            if sys.stderr.isatty() or number % 5000 == 0:
                print(number, dict(statuses), file=sys.stderr, flush=True)

    await asyncio.gather(*(send() for _ in range(at_once)))
    return statuses


async def run(bundle: Path, pooled: Mapping[str, Path], count: int, seed: int) -> Counter[int]:
    """Confuses an application of its own, of which nothing is left in the end. ``pooled``: bundles by their kind."""
    app = InProcess(bundle, pooled)
    try:
        models = [await app.front.loaded(model) for model in app.front.models.values()]
        statuses = await confuse(app, count, seed)
        assert not any(model.running for model in models) and not app.front.running
        assert app.front.tenants.find(None).running == 0  # type: ignore[union-attr]
        assert not any(model.deaths for model in models)
    finally:
        await app.front.close()
    return statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    for kind in CLASSES:
        flag = f"--{kind.replace('_', '-')}"
        parser.add_argument(flag, type=Path, required=True, metavar="BUNDLE", help=f"of the kind {kind}")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.time()
    pooled = {kind: getattr(options, kind) for kind in CLASSES}
    statuses = asyncio.run(run(options.bundle, pooled, options.count, options.seed))
    counts_of = {
        "bodies": options.count,
        "seed": options.seed,
        "statuses": {str(status): number for status, number in sorted(statuses.items())},
        "seconds": round(time.time() - began),
    }
    print(json.dumps(counts_of, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(counts_of, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
