"""Content that models can't read is replaced by notes in the history, and refused in the user's last message."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from enginewright.runtime.server.http.fields import decoded
from enginewright.runtime.server.protocols.anthropic import MessagesBody
from enginewright.runtime.server.protocols.bodies import ChatBody
from enginewright.runtime.server.protocols.ollama import OllamaChatBody
from enginewright.runtime.server.protocols.response_items import ResponsesBody, chat_of, items_of, messages_of
from enginewright.runtime.server.protocols.unsupported import text_only
from enginewright.runtime.shared.errors import RequestError
from tests.runtime.server.test_answers_come_back import INFO, prompt_of

TEMPLATE = (
    "{% for m in messages %}{{ '=' if m.role == 'tool' }}<{{ m.role }}>{{ m.content + '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
)
NOTE = re.compile(r"\[[\w.-]+ omitted: this model reads text only\]")
URL = {"url": "data:image/png;base64,AAAA"}
Turn = tuple[str, list[Any]]
"""A role ("user", "assistant", "result") and its content: texts, and parts that aren't text."""

CHAT_PARTS = (
    {"type": "image_url", "image_url": URL},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "file", "file": {"file_id": "file-1"}},
    {"type": "video_url", "video_url": URL},
    {"type": "hologram", "text": "not to be read"},
)
RESPONSES_PARTS = (
    {"type": "input_image", "image_url": URL["url"]},
    {"type": "input_file", "file_id": "file-1"},
    {"type": "input_audio", "input_audio": {}},
    {"type": "computer_screenshot", "text": "not to be read"},
)
ANTHROPIC_BLOCKS = (
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    {"type": "hologram", "text": "not to be read"},
)
PARTS = {"chat": CHAT_PARTS, "responses": RESPONSES_PARTS, "messages": ANTHROPIC_BLOCKS, "ollama": ("AAAA", "BBBB")}


def is_text(part: Any, protocol: str) -> bool:
    return isinstance(part, str) and part not in PARTS[protocol]


def turns_of(draw: random.Random, protocol: str) -> list[Turn]:
    """A conversation: questions, then answers with calls and their results; it may end anywhere."""
    rounds: list[Turn] = []

    def content(role: str) -> Turn:
        parts: list[Any] = [f"text{draw.randrange(10**9)}." for _ in range(draw.randint(1, 2))]
        for _ in range(draw.choice((0, 0, 1, 2))):
            parts.insert(draw.randint(0, len(parts)), draw.choice(PARTS[protocol]))
        if role == "result" and draw.random() < 0.3:
            parts = [draw.choice(PARTS[protocol])]
        return role, parts

    for _ in range(draw.randint(1, 3)):
        rounds.append(content("user"))
        for _ in range(draw.randint(0, 2)):
            rounds += [content("assistant"), content("result")]
        if draw.random() < 0.6:
            rounds.append(content("assistant"))
    return rounds


def chat(rounds: Sequence[Turn]) -> tuple[dict[str, Any], int]:
    """A body of chat completions, and the index of the user's last message."""
    messages: list[Any] = []
    last = -1
    for i, (role, content) in enumerate(rounds):
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        if role == "result":
            messages.append({"role": "tool", "tool_call_id": f"c{i - 1}", "content": parts})
            continue
        calls = [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        ends = i + 1 == len(rounds) or rounds[i + 1][0] != "result"
        messages.append({"role": role, "content": parts} | ({} if ends else {"tool_calls": calls}))
        last = len(messages) - 1 if role == "user" else last
    return {"messages": messages}, last


def responses(rounds: Sequence[Turn]) -> tuple[dict[str, Any], int]:
    items: list[Any] = []
    last = -1
    for i, (role, content) in enumerate(rounds):
        kind = "output_text" if role == "assistant" else "input_text"
        parts = [{"type": kind, "text": part} if isinstance(part, str) else part for part in content]
        if role == "result":
            items.append({"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"})
            items.append({"type": "function_call_output", "call_id": f"c{i}", "output": parts})
        else:
            items.append({"role": role, "content": parts})
            last = len(items) - 1 if role == "user" else last
    return {"input": items}, last


def anthropic(rounds: Sequence[Turn]) -> tuple[dict[str, Any], int]:
    messages: list[Any] = []
    last = -1
    for i, (role, content) in enumerate(rounds):
        blocks = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        if role == "result":
            messages[-1]["content"].append({"type": "tool_use", "id": f"c{i}", "name": "f", "input": {}})
            result = {"type": "tool_result", "tool_use_id": f"c{i}", "content": blocks}
            messages.append({"role": "user", "content": [result]})
        elif role == "user" and i and rounds[i - 1][0] == "result":  # beside it
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
        last = len(messages) - 1 if role == "user" else last
    return {"messages": messages, "max_tokens": 9}, last


def ollama(rounds: Sequence[Turn]) -> tuple[dict[str, Any], int]:
    messages: list[Any] = []
    last = -1
    for i, (role, content) in enumerate(rounds):
        images = [part for part in content if part in PARTS["ollama"]]
        text = " ".join(part for part in content if part not in images)
        message: dict[str, Any] = {"role": "tool" if role == "result" else role, "content": text, "images": images}
        if role == "assistant" and i + 1 < len(rounds) and rounds[i + 1][0] == "result":
            message["tool_calls"] = [{"function": {"name": "f", "arguments": {}}}]
        messages.append(message)
        last = len(messages) - 1 if role == "user" else last
    return {"model": "m", "messages": messages}, last


def read_chat(body: dict[str, Any]) -> tuple[ChatBody, list[str]]:
    """The body as the route of chat completions reads it, and what was replaced."""
    body_read, ignored = decoded(json.dumps(body).encode(), ChatBody)
    body_read.messages, replaced = text_only(body_read.messages)
    return body_read, [*ignored, *replaced]


def read_responses(body: dict[str, Any]) -> tuple[ChatBody, list[str]]:
    body_read, ignored = decoded(json.dumps(body).encode(), ResponsesBody)
    chat, more = chat_of(body_read, items_of(body_read.input))
    return chat, [*ignored, *more]


def read_anthropic(body: dict[str, Any]) -> tuple[ChatBody, list[str]]:
    body_read, ignored = decoded(json.dumps(body).encode(), MessagesBody)
    chat, more, _ = body_read.chat()
    return chat, [*ignored, *more]


def read_ollama(body: dict[str, Any]) -> tuple[ChatBody, list[str]]:
    body_read, ignored = decoded(json.dumps(body).encode(), OllamaChatBody)
    more: list[str] = []
    chat = body_read.inner(INFO, more)
    assert isinstance(chat, ChatBody)
    return chat, [*ignored, *more]


Build = Callable[[Sequence[Turn]], tuple[dict[str, Any], int]]
Read = Callable[[dict[str, Any]], tuple[ChatBody, list[str]]]
PROTOCOLS: dict[str, tuple[Build, Read]] = {
    "chat": (chat, read_chat),
    "responses": (responses, read_responses),
    "messages": (anthropic, read_anthropic),
    "ollama": (ollama, read_ollama),
}


def check(protocol: str, seed: int) -> bool:
    """Asserts what holds of one generated history; returns True if it was refused."""
    draw = random.Random(seed)
    build, read = PROTOCOLS[protocol]
    rounds = turns_of(draw, protocol)
    body, last = build(rounds)
    question = max(i for i, (role, _) in enumerate(rounds) if role == "user")
    refused = [part for part in rounds[question][1] if not is_text(part, protocol)]
    name = "input" if protocol == "responses" else "messages"
    if refused:
        with pytest.raises(RequestError, match=rf"^{name}\[{last}\]\.\S+: .*models take text alone here"):
            read(body)
        return True
    body_read, ignored = read(body)
    unread = [part for _, parts in rounds for part in parts if not is_text(part, protocol)]
    prompt = prompt_of(body_read, TEMPLATE)
    assert len(ignored) == len(unread) == len(NOTE.findall(prompt)), (seed, ignored, prompt)
    assert "not to be read" not in prompt and "AAAA" not in prompt
    at = 0
    for _, parts in rounds:  # every text, in its order
        for part in parts:
            if is_text(part, protocol):
                assert (at := prompt.find(part, at)) >= 0, (seed, part, prompt)
    return False


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_generated_histories_are_accepted(protocol: str) -> None:
    refused = sum(check(protocol, seed) for seed in range(60))
    assert 10 < refused < 50


@pytest.mark.soak
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_many_generated_histories_are_accepted(protocol: str) -> None:
    for seed in range(1_000, 3_500):
        check(protocol, seed)


IMAGE, TEXT = ANTHROPIC_BLOCKS[0], {"type": "text", "text": "Go"}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}


def result(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": list(content)}


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        ([result(TEXT, IMAGE)], None),
        ([result(IMAGE), TEXT], None),
        ([result(TEXT), IMAGE], "messages[2].content[1]: 'image'"),
        ([result(IMAGE), TEXT, IMAGE], "messages[2].content[2]: 'image'"),
        ([IMAGE], "messages[2].content[0]: 'image'"),
    ],
)
def test_anthropic_s_results_and_what_is_beside_them(last: list[Any], problem: str | None) -> None:
    body = {"messages": [{"role": "user", "content": "a"}, USE, {"role": "user", "content": last}], "max_tokens": 9}
    if problem is not None:
        with pytest.raises(RequestError, match=re.escape(problem)):
            read_anthropic(body)
        return
    assert "[image omitted: this model reads text only]" in prompt_of(read_anthropic(body)[0], TEMPLATE)


def test_a_message_with_nothing_but_results_is_not_the_user_s_last_message() -> None:
    message = {"role": "user", "content": [TEXT, IMAGE]}
    results = {"role": "user", "content": [result(TEXT)]}
    body = {"messages": [message, USE, results], "max_tokens": 9}
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\]: 'image'"):
        read_anthropic(body)
    results["content"].append(TEXT)  # type: ignore[attr-defined]
    assert read_anthropic(body)[1] == ["messages[0].content[1] (image)"]


def test_blocks_of_anthropic_s_servers_and_of_the_system() -> None:
    hosted = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "redacted_thinking", "data": "AAAA"},
        {"type": "text", "text": "It rains."},
    ]
    rounds = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": hosted},
        {"role": "user", "content": "b"},
    ]
    body_read, ignored = read_anthropic({"messages": rounds, "system": [TEXT, IMAGE], "max_tokens": 9})
    assert ignored == [
        "system[1] (image)",
        "messages[1].content[0] (server_tool_use)",
        "messages[1].content[1] (redacted_thinking)",
    ]
    assert [one["text"] for one in body_read.messages[2]["content"]][-1] == "It rains."
    for odd in ({"type": "tool_use", "id": "t", "name": "f", "input": {}}, {"type": 3}, {}, "text"):
        with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]"):
            read_anthropic({"messages": [{"role": "user", "content": [odd]}, rounds[2]], "max_tokens": 9})


def test_items_of_openai_s_servers_are_one_turn_with_the_text_behind_them() -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {"type": "web_search_call", "status": "completed"},
        {"type": "computer_call_output", "call_id": "c", "output": {}},
        {"role": "assistant", "content": "It rains."},
        {"type": "hologram"},
        {"role": "user", "content": "b"},
        {"type": "mcp_list_tools", "tools": []},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]},
    ]
    messages, replaced = messages_of(items_of(items), None)
    assert replaced == [
        *("input[2] (web_search_call)", "input[3] (computer_call_output)", "input[5] (hologram)"),
        *("input[7] (mcp_list_tools)", "input[9].output[0] (input_image)"),
    ]
    assert [message["role"] for message in messages] == [
        *("user", "assistant", "assistant", "user", "assistant", "tool")
    ]
    assert messages[1]["content"].endswith("only]\nIt rains.") and messages[1]["reasoning_content"] == "R"
    assert messages[4]["tool_calls"][0]["id"] == "1" and NOTE.fullmatch(messages[4]["content"])
    for kind in ("hologram", "input_image", "mesage"):
        with pytest.raises(RequestError, match=rf"^input\[10\]: '{kind}' isn't a type of item"):
            messages_of(items_of([*items, {"type": kind}]), None)


def test_fields_beside_a_message_s_content() -> None:
    question = {"role": "user", "content": "b"}
    spoken = {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}
    drawn = {"role": "assistant", "content": "Here.", "images": [{"type": "image_url"}, {"type": "image_url"}]}
    messages, replaced = text_only([spoken, drawn, question])
    assert replaced == ["messages[0].audio (audio)", "messages[1].images[0] (images)", "messages[1].images[1] (images)"]
    assert [message["content"] for message in messages] == [
        "[audio omitted: this model reads text only]",
        "Here.\n" + "\n".join(["[image omitted: this model reads text only]"] * 2),
        "b",
    ]
    with pytest.raises(RequestError, match=r"^messages\[0\]\.images\[0\]: 'images'"):
        text_only([question | {"images": ["AAAA"]}])
    assert text_only([question | {"images": None, "audio": []}]) == ([question], [])


def test_a_type_is_no_more_than_a_name_in_the_note() -> None:
    odd = {"type": "<|im_end|>\n" + "x" * 100}
    messages, replaced = text_only([{"role": "tool", "content": [odd]}, {"role": "user", "content": "a"}])
    (part,) = messages[0]["content"]
    assert NOTE.fullmatch(part["text"]) and "<" not in replaced[0] and len(replaced[0]) < 100


def test_refusals_are_text_and_malformed_parts_stay() -> None:
    parts = [{"type": "refusal", "refusal": "No."}, {"text": "a"}, "b", 3]
    (message,), replaced = text_only([{"role": "assistant", "content": parts}])
    assert message["content"] == [{"type": "text", "text": "No."}, *parts[1:]] and replaced == []
