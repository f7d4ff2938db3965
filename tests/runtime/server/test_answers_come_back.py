"""The server accepts what it answered: answers of every finish reason are history in every protocol."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.server.engines.records import Ended
from enginewright.runtime.server.http.fields import decoded
from enginewright.runtime.server.http.front import Front
from enginewright.runtime.server.http.options import ServerOptions
from enginewright.runtime.server.protocols.answers import ChatShape, Given, News, Shape, usage
from enginewright.runtime.server.protocols.anthropic import MessagesBody, MessagesShape
from enginewright.runtime.server.protocols.bodies import ChatBody
from enginewright.runtime.server.protocols.conversations import chat_prompt
from enginewright.runtime.server.protocols.ollama import OllamaChatBody, OllamaShape
from enginewright.runtime.server.protocols.reading import Reader
from enginewright.runtime.server.protocols.response_items import ResponsesBody, chat_of, items_of
from enginewright.runtime.server.protocols.responses import ResponsesShape, Stored
from enginewright.runtime.server.protocols.tools import call_arguments, checked_messages, tool_choice
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.tasks.generate import Finished, Generated
from enginewright.runtime.text.tokenizer import Tokenizer
from tests.runtime.server.conftest import TOOLS_TEMPLATE, Server
from tests.runtime.text.chat_streams import MARKERS, TOOLS, answers, byte_tokenizer, format_of, tokenizer_of

ANSWERS = ("chat", "responses", "messages", "ollama")
ASKED = {"role": "user", "content": "Go"}
FUNCTIONS = [tool["function"] for tool in TOOLS]
INFO = ModelInfo("tiny", "LlamaForCausalLM", vocab_size=512, context_length=1 << 16)
_EACH = (
    "{% for m in messages %}{{ '=' if m.role == 'tool' }}<{{ m.role }}>{{ m.reasoning_content or '' }}"
    "{{ m.content + '' }}"
)
_CALLS = _EACH + "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
_END = "{% endfor %}{% endfor %}<assistant>{{ tools | length }}"
IDS = "{% if c.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
TEMPLATES = {
    "json": TOOLS_TEMPLATE,
    "text or json": _CALLS + "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}" + _END,
    "items": _CALLS + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}" + _END,
    "text": _CALLS + "{{ '```' + c.function.arguments + '```' }}" + _END,
    "ids": _CALLS + IDS + "{{ c.function.arguments | tojson }}" + _END,
    "ids and text": _CALLS + IDS + "{{ '```' + c.function.arguments + '```' }}" + _END,
}
"""The ways in which models' templates write calls."""


@cache
def tokenizer_with(template: str) -> Tokenizer:
    return byte_tokenizer([], template=TEMPLATES.get(template) or template)


def prompt_of(body: ChatBody, template: str) -> str:
    """The prompt of a conversation."""
    front = Front(ServerOptions(models={}), {})
    model: Any = SimpleNamespace(tokenizer=tokenizer_with(template), model=INFO)
    return chat_prompt(front, model, body, tool_choice(body.tools), "", splice=False)[0].text


def shape_of(protocol: str, body: ChatBody) -> Shape:
    """An answer's shape, as the protocol's route makes it."""
    rest = (body, "m", tokenizer_of("hermes"), None, 1, tool_choice(TOOLS))
    if protocol == "responses":
        body_of_responses = ResponsesBody(input="Go", max_output_tokens=body.max_tokens)
        return ResponsesShape(body_of_responses, {}, Stored(), [], "", *rest)
    if protocol == "messages":
        return MessagesShape(MessagesBody(messages=[ASKED], max_tokens=body.max_tokens), *rest)
    return OllamaShape("m", *rest) if protocol == "ollama" else ChatShape(*rest)


def drawn(draw: random.Random) -> tuple[tuple[int, ...], str, str]:
    """An answer's tokens, which may be cut off anywhere, the format's name, and its finish reason."""
    name = draw.choice(list(MARKERS))
    ids = answers(name, 1, draw.randrange(1 << 30))[0].ids
    if draw.random() < 0.7:
        return ids[: draw.randrange(len(ids) + 1)], name, "length"
    return (ids if draw.random() < 0.9 else ()), name, "stop"


def answered(protocol: str, ids: tuple[int, ...], name: str, finish: str, draw: random.Random) -> Any:
    """The answer as a client decodes it."""
    body = ChatBody(messages=[ASKED], max_tokens=len(ids), n=2 if protocol == "chat" else None)
    shape = shape_of(protocol, body)
    for index in range(body.n or 1):
        one = Finished("", ids, finish)
        reader = Reader(format_of(name).parser(tokenizer_of(name), tools=TOOLS), SamplingParams(), prefix="call_")
        news: News = reader.read(one)
        shape.add(index, news, one, Ended(0, Generated((one,))), Given("", ()))
    return json.loads(json.dumps(shape.response(usage(1, len(ids)))))


def turn_of(protocol: str, answer: Any, draw: random.Random) -> dict[str, Any]:
    """The answer as the other protocols' proxies hold it: text, reasoning, and calls with texts as arguments."""
    if protocol == "chat":
        message = draw.choice(answer["choices"])["message"]
        content, reasoning = message["content"] or "", message.get("reasoning_content", "")
        calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    elif protocol == "responses":
        parts = {"message": "", "reasoning": ""}
        for item in answer["output"]:
            for part in item.get("content", ()):
                parts[item["type"]] += part["text"]
        content, reasoning = parts["message"], parts["reasoning"]
        calls = [(i["call_id"], i["name"], i["arguments"]) for i in answer["output"] if i["type"] == "function_call"]
    elif protocol == "messages":
        content = "".join(one.get("text", "") for one in answer["content"])
        reasoning = "".join(one.get("thinking", "") for one in answer["content"])
        calls = [(c["id"], c["name"], json.dumps(c["input"])) for c in answer["content"] if c["type"] == "tool_use"]
    else:
        message = answer["message"]
        content, reasoning = message["content"], message.get("thinking", "")
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [(f"c{i}", f["name"], json.dumps(f["arguments"])) for i, f in enumerate(functions)]
    return {"content": content, "reasoning": reasoning, "calls": calls}


def object_or_text(arguments: str) -> Any:
    """A call's arguments as a proxy translates them that doesn't refuse what isn't JSON."""
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments


def chat_history(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
        for name, function, arguments in turn["calls"]
    ]
    message = {"role": "assistant", "content": turn["content"] or None, "reasoning_content": turn["reasoning"]}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in calls]
    return [message | ({"tool_calls": calls} if calls else {}), *results]


def own_history(protocol: str, answer: Any, turn: Mapping[str, Any], draw: random.Random) -> list[Any]:
    """The answer as the protocol's own client sends it back, with a result of each call."""
    if protocol == "chat":
        message = draw.choice(answer["choices"])["message"]
        calls = message.get("tool_calls", ())
        return [message, *({"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls)]
    if protocol == "responses":
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "3"} for call in calls]
        return [*answer["output"], *results]
    if protocol == "messages":
        uses = [block for block in answer["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "3"} for use in uses]
        return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results or "Go on"}]
    calls = answer["message"].get("tool_calls", ())
    results = [{"role": "tool", "tool_name": call["function"]["name"], "content": "3"} for call in calls]
    return [answer["message"], *results]


def translated(protocol: str, turn: Mapping[str, Any]) -> list[Any]:
    """A turn in the words of a protocol, as proxies translate it."""
    if protocol == "chat":
        return chat_history(turn)
    if protocol == "responses":
        items: list[Any] = []
        if turn["reasoning"]:
            text = {"type": "reasoning_text", "text": turn["reasoning"]}
            items.append({"type": "reasoning", "summary": [], "content": [text]})
        if turn["content"]:
            items.append({"role": "assistant", "content": [{"type": "output_text", "text": turn["content"]}]})
        for name, function, arguments in turn["calls"]:
            items.append({"type": "function_call", "call_id": name, "name": function, "arguments": arguments})
            items.append({"type": "function_call_output", "call_id": name, "output": ""})
        return items
    calls = [(name, function, object_or_text(arguments)) for name, function, arguments in turn["calls"]]
    if protocol == "messages":
        blocks = [{"type": "thinking", "thinking": turn["reasoning"], "signature": ""}] if turn["reasoning"] else []
        blocks += [{"type": "text", "text": turn["content"]}]
        blocks += [
            {"type": "tool_use", "id": name, "name": function, "input": values} for name, function, values in calls
        ]
        return [{"role": "assistant", "content": blocks}]
    functions = [{"function": {"name": function, "arguments": values}} for _, function, values in calls]
    return [{"role": "assistant", "content": turn["content"], "thinking": turn["reasoning"], "tool_calls": functions}]


def chat_body(protocol: str, history: list[Any]) -> ChatBody:
    """A body with the history, as the server decodes it."""
    again = [ASKED, *history, ASKED]
    if protocol == "chat":
        return decoded(json.dumps({"messages": again, "tools": TOOLS}).encode(), ChatBody)[0]
    if protocol == "responses":
        tools = [{"type": "function", **function} for function in FUNCTIONS]
        body = decoded(json.dumps({"input": again, "tools": tools}).encode(), ResponsesBody)[0]
        return chat_of(body, items_of(body.input))[0]
    if protocol == "messages":
        tools = [{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS]
        fields = {"messages": again, "max_tokens": 9, "tools": tools}
        return decoded(json.dumps(fields).encode(), MessagesBody)[0].chat()[0]
    fields = {"model": "m", "messages": again, "tools": TOOLS}
    body = decoded(json.dumps(fields).encode(), OllamaChatBody)[0].inner(INFO, [])
    assert isinstance(body, ChatBody)
    return body


def check(seed: int) -> None:
    """Asserts that one answer is accepted in all protocols, and that its content is in the prompt."""
    draw = random.Random(seed)
    ids, name, finish = drawn(draw)
    protocol, template = draw.choice(ANSWERS), draw.choice(list(TEMPLATES))
    answer = answered(protocol, ids, name, finish, draw)
    turn = turn_of(protocol, answer, draw)
    histories = {other: translated(other, turn) for other in ANSWERS}
    histories[protocol] = own_history(protocol, answer, turn, draw)
    for other, history in histories.items():
        try:
            prompt = prompt_of(chat_body(other, history), template)
        except RequestError as e:
            pytest.fail(f"seed {seed}: {protocol} to {other}, {template}: {e}\n{json.dumps(history)}")
        assert turn["content"] in prompt, (seed, other, history)
        for _, function, _ in turn["calls"]:
            assert function in prompt, (seed, other, history)


@pytest.mark.parametrize("part", range(2))
def test_every_answer_is_accepted_back(part: int) -> None:
    for seed in range(part * 100, (part + 1) * 100):
        check(seed)


@pytest.mark.soak
def test_five_thousand_answers_are_accepted_back() -> None:
    for seed in range(1_000, 6_000):
        check(seed)


CUT = '{"city": "New'
ROUTES: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", lambda history: {"messages": history}),
    "responses": ("/v1/responses", lambda history: {"input": history}),
    "messages": ("/v1/messages", lambda history: {"messages": history}),
    "ollama": ("/api/chat", lambda history: {"messages": history, "stream": False}),
}
LIMITS = {"responses": {"max_output_tokens": 2}, "ollama": {"options": {"num_predict": 2}}}


@pytest.mark.matrix
@pytest.mark.parametrize("protocol", ANSWERS)
@pytest.mark.parametrize("arguments", [CUT, "", "null", "[1]", '"x"', "not JSON"])
def test_a_call_that_was_cut_off_is_history(agents: Server, protocol: str, arguments: str) -> None:
    turn = {"content": "", "reasoning": "", "calls": [("c1", "weather", arguments)]}
    path, fields = ROUTES[protocol]
    history = [ASKED, *translated(protocol, turn), {"role": "user", "content": "Go on"}]
    limit = LIMITS.get(protocol, {"max_tokens": 2})
    reply = agents.ask("POST", path, {"model": "tools", **fields(history), **limit})
    assert reply.status == 200, reply.body


def test_arguments_are_an_object_or_the_text() -> None:
    def read(arguments: Any) -> Any:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        (message,) = checked_messages([{"role": "assistant", "tool_calls": [call]}])
        return message["tool_calls"][0]["function"]["arguments"]

    assert read('{"a": 1}') == read({"a": 1}) == {"a": 1} and read("") == read(None) == {}
    assert [read(text) for text in (CUT, "[1]", '"x"')] == [CUT, "[1]", '"x"'] and read([1, "é"]) == '[1, "é"]'
    deep = '{"a": ' * 300 + "1" + "}" * 300
    long = '{"a": ' + "9" * 500 + "}"  # no body may have such a number
    assert (read(deep), read(long)) == (deep, long)
    assert call_arguments(deep) is call_arguments(long) is call_arguments(CUT) is None
    assert call_arguments("") == {} and call_arguments('{"a": {}}') == {"a": {}}


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_calls_in_the_form_that_a_template_reads(template: str) -> None:
    whole = {"content": "", "reasoning": "", "calls": [("call_1", "weather", '{"city": "Rome"}')]}
    cut = {"content": "", "reasoning": "", "calls": [("call_2", "weather", CUT)]}
    body = chat_body("chat", [*chat_history(whole), *chat_history(cut)])
    prompt = prompt_of(body, template)
    assert "Rome" in prompt and "New" in prompt
    if template not in ("json", "ids"):  # these write a text once more as JSON
        assert CUT in prompt


def test_what_no_form_makes_acceptable_is_refused_for_what_was_sent() -> None:
    template = _CALLS + "{{ raise_exception('no calls ' ~ c.function.arguments.a) }}" + _END
    turn = {"content": "", "reasoning": "", "calls": [("c", "f", '{"a": 7}')]}
    with pytest.raises(RequestError, match="no calls 7"):
        prompt_of(chat_body("chat", chat_history(turn)), template)


def test_a_call_too_deep_to_come_back_is_not_answered_as_an_object() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": ' + '{"a": ' * 105 + "1" + "}" * 105 + "}\n</tool_call>"
    ids = tuple(tokenizer_of("hermes").encode(call, add_special_tokens=False))
    draw = random.Random(0)
    for protocol in ANSWERS:
        answer = answered(protocol, ids, "hermes", "stop", draw)
        turn = turn_of(protocol, answer, draw)
        history = own_history(protocol, answer, turn, draw)
        assert "now" in prompt_of(chat_body(protocol, history), "items")


IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
IMAGES: dict[str, tuple[list[Any], str]] = {
    "chat": ([{"role": "tool", "tool_call_id": "c1", "content": [IMAGE_URL]}], "messages[2].content[0] (image_url)"),
    "responses": (
        [{"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": "data:,"}]}],
        "input[2].output[0] (input_image)",
    ),
    "messages": (
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image"}]}]}],
        "messages[2].content[0].content[0] (image)",
    ),
    "ollama": (
        [{"role": "tool", "tool_name": "weather", "content": "", "images": ["AAAA"]}],
        "messages[2].images[0] (images)",
    ),
}
"""Protocol -> the result of a call that is an image, and its name in the header."""
ASKED_BY_IMAGE: dict[str, tuple[Any, str]] = {
    "chat": ([IMAGE_URL], "messages[0].content[0]"),
    "responses": ([{"type": "input_image", "image_url": "data:,"}], "input[0].content[0]"),
    "messages": ([{"type": "image", "source": {}}], "messages[0].content[0]"),
    "ollama": ("Look", "messages[0].images[0]"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", ANSWERS)
def test_a_session_survives_an_image_in_a_result(agents: Server, protocol: str, stream: bool) -> None:
    path, fields = ROUTES[protocol]
    call = translated(protocol, {"content": "", "reasoning": "", "calls": [("c1", "weather", CUT)]})
    calls = [one for one in call if one.get("role", "assistant") == "assistant" and one.get("type") != "message"]
    results, name = IMAGES[protocol]
    history = [ASKED, *calls[:1], *results]
    body = {"model": "tools", **fields(history), **LIMITS.get(protocol, {"max_tokens": 2}), "stream": stream}
    reply = agents.ask("POST", path, body)
    assert reply.status == 200, reply.body
    assert name in reply.headers["x-enginewright-ignored"]


@pytest.mark.parametrize("protocol", ANSWERS)
def test_an_image_in_the_last_message_of_the_user_is_refused_by_name(agents: Server, protocol: str) -> None:
    path, fields = ROUTES[protocol]
    content, name = ASKED_BY_IMAGE[protocol]
    images = {"images": ["AAAA"]} if protocol == "ollama" else {}
    limit = LIMITS.get(protocol, {"max_tokens": 2})
    reply = agents.ask("POST", path, {"model": "tools", **fields([{**ASKED, "content": content, **images}]), **limit})
    error = reply.json["error"]
    message = error if protocol == "ollama" else error["message"]
    assert reply.status == 400 and message.startswith(f"{name}: "), reply.body
    if protocol in ("chat", "responses"):
        assert error["param"] == name


def test_counts_of_tokens_take_what_the_answers_take(agents: Server) -> None:
    for protocol, path in (("messages", "/v1/messages/count_tokens"), ("responses", "/v1/responses/input_tokens")):
        results, _ = IMAGES[protocol]
        call = translated(protocol, {"content": "", "reasoning": "", "calls": [("c1", "weather", CUT)]})[:1]
        reply = agents.ask("POST", path, {"model": "tools", **ROUTES[protocol][1]([ASKED, *call, *results])})
        assert reply.status == 200 and reply.json["input_tokens"] > 10, reply.body
    results, _ = IMAGES["chat"]
    reply = agents.ask("POST", "/tokenize", {"model": "tools", "messages": [*results, ASKED]})
    assert reply.status == 200 and reply.json["count"] > 10, reply.body
