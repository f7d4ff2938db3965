"""Anthropic's protocol: ``/v1/messages``, and ``/v1/messages/count_tokens``.

A body is converted to a body of chat completions, and an answer is converted to Anthropic's content blocks. The fields
are those of https://docs.anthropic.com/en/api/messages; each is used, refused or ignored, as in bodies.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from ...requests.vllm_names import Only
from ...shared.errors import RequestError, shown
from ...tasks.generate import Finished
from ..engines.engine_client import Model
from ..engines.records import Ended
from ..http.errors import ApiError, json_response
from ..http.fields import Fields, check_parts
from ..http.front import Front
from ..http.routes import Routes
from .answers import Given, News, Shape, event
from .bodies import ChatBody
from .conversations import counted
from .jobs import Order, answer
from .tools import call_arguments
from .unsupported import Unsupported, type_of

LEFT_OUT_HEADER = "x-enginewright-left-out"
_BILLING = re.compile(r"\Ax-anthropic-billing-header: cc_version=[^\n]*(?:\n|\Z)")
"""A line that a coding agent puts at the start of its system prompt.

The line changes with each request, and no cached prefix would match a prompt that contains it.
"""
_KEEP_ALL: dict[str, Any] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_HINTS = ("cache_control",)
_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "citations"),
    "thinking": ("thinking", "signature"),
    "tool_use": ("id", "name", "input", "caller"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
"""The types of content blocks, and the fields of each type."""
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


ANTHROPIC_VERSION = "anthropic-version"
"""The header that tells Anthropic's clients from OpenAI's, at paths that both protocols have."""
_MOST_MODELS = 1000


def model_info(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the description of a model in Anthropic's format; ``row`` is the description in OpenAI's format."""
    created = datetime.fromtimestamp(row["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    names = {"type": "model", "id": row["id"], "display_name": row["id"]}
    return names | {"created_at": created, "lifecycle": "active", "max_input_tokens": row["max_model_len"]}


def model_page(rows: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Returns a page of the list of models in Anthropic's format.

    Args:
        rows: descriptions of all models in OpenAI's format.
        query: parameters of the URL: ``limit`` (models per page), and ``after_id`` or ``before_id``.

    Raises RequestError naming a parameter with a wrong value.
    """
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= _MOST_MODELS):
        raise RequestError(f"limit: {shown(limit)} is out of range", hint=f"It must be from 1 to {_MOST_MODELS}.")
    ids, most = [row["id"] for row in rows], int(limit)
    begin, end = 0, len(rows)
    for name in ("after_id", "before_id"):
        if (mark := query.get(name)) is not None and mark not in ids:
            raise RequestError(f"{name}: there is no {shown(mark)}", hint="Pass first_id or last_id of a page.")
    if "after_id" in query:
        begin = ids.index(query["after_id"]) + 1
    if "before_id" in query:
        end = ids.index(query["before_id"])
        begin = max(begin, end - most)
    page = list(rows[begin : min(end, begin + most)])
    more = begin > 0 if "before_id" in query else begin + most < end
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"data": page, "has_more": more, "first_id": first, "last_id": last}


class MessagesBody(Fields, kw_only=True):
    """The body of ``/v1/messages``. ``seed`` is an extension of Enginewright.

    Without ``thinking`` the model doesn't reason, if its chat template can turn reasoning off.
    """

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    seed: int | None = None

    needed: ClassVar[frozenset[str]] = frozenset({"messages"})
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            *("metadata", "service_tier", "speed", "cache_control", "inference_geo", "diagnostics"),
            *("user_profile_id", "workspace_id"),
        }
    )
    refused: ClassVar[Mapping[str, Only]] = {
        "container": Only((None,), "the server runs no code of clients", "Leave it out."),
        "mcp_servers": Only((None, []), "the server calls no other servers", "Call their tools in the client."),
        "context_management": Only(
            (None, {}, _KEEP_ALL), "conversations are never shortened", "Leave out old messages."
        ),
    }

    def chat(self) -> tuple[ChatBody, list[str], bool]:
        """Returns the body as one of chat completions, the names of ignored fields, and True if a billing line was
        removed.

        Raises RequestError naming a field that isn't supported.
        """
        unsupported = Unsupported()
        system, left_out = _system(self.system, unsupported)
        last = max((i for i, message in enumerate(self.messages) if _is_of_user(message)), default=-1)
        groups = [_message(i, message, unsupported, i == last) for i, message in enumerate(self.messages)]
        messages = [*system, *(message for group in groups for message in group)]
        ignored = unsupported.replaced
        effort, form = self._effort()
        choice, parallel = _choice(self.tool_choice)
        body = ChatBody(
            messages=messages,
            model=self.model,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            tools=None if self.tools is None else [_tool(i, tool) for i, tool in enumerate(self.tools)],
            tool_choice=choice,
            parallel_tool_calls=parallel,
            reasoning_effort=effort,
            thinking={"budget_tokens": self._budget()},
            response_format=form,
            continue_final_message=messages[-1]["role"] == "assistant" if messages else None,
        )
        return body, ignored, left_out

    def _effort(self) -> tuple[str, dict[str, Any] | None]:
        """Returns the effort of the reasoning ("none" without reasoning), and OpenAI's ``response_format`` of the
        answer.

        Raises RequestError naming the field with a wrong value.
        """
        config = _known("output_config", self.output_config or {}, ("effort", "format"))
        form = config.get("format") or self.output_format
        if form is not None:
            schema = form.get("schema") if isinstance(form, Mapping) and form.get("type") == "json_schema" else None
            if not isinstance(schema, Mapping):
                hint = 'Write {"type": "json_schema", "schema": {...}}.'
                raise RequestError(f"output_config: format: {shown(form)} isn't a format", hint=hint)
            form = {"type": "json_schema", "json_schema": {"schema": schema}}
        thinking = _known("thinking", self.thinking or {"type": "disabled"}, ("type", "budget_tokens", "display"))
        if thinking.get("type") not in ("enabled", "adaptive", "disabled"):
            hint = 'It is "enabled", "adaptive" or "disabled".'
            raise RequestError(f"thinking: {shown(thinking.get('type'))} isn't a type", hint=hint)
        if thinking.get("display") not in (None, "summarized", "omitted"):
            hint = 'It is "summarized" or "omitted".'
            raise RequestError(f"thinking: display: {shown(thinking['display'])} isn't a way to show it", hint=hint)
        effort = config.get("effort")
        if effort is not None and not isinstance(effort, str):
            raise RequestError(f"output_config: effort: {shown(effort)} isn't an effort", hint='Such as "low".')
        return "none" if thinking["type"] == "disabled" else effort or "on", form

    def _budget(self) -> Any:
        """Returns the body's limit of reasoning tokens, whose type isn't checked; None for no limit."""
        thinking = self.thinking or {}
        return thinking.get("budget_tokens") if thinking.get("type") == "enabled" else None

    @property
    def omits(self) -> bool:
        """Returns True if the reasoning isn't shown."""
        return self.thinking is not None and self.thinking.get("display") == "omitted"


class CountBody(MessagesBody, kw_only=True):
    """The body of ``/v1/messages/count_tokens``."""


def _known(place: str, value: Any, names: Sequence[str]) -> Mapping[str, Any]:
    """Returns ``value`` if it is an object that has no fields other than ``names``.

    Raises RequestError naming ``place``, which is the position of the object in the body.
    """
    if not isinstance(value, Mapping):
        raise RequestError(f"{place}: {shown(value)} isn't an object", hint=f"It has {', '.join(names)}.")
    check_parts(place, value, names)
    return value


def _block(place: str, block: Any, kinds: Sequence[str]) -> Mapping[str, Any]:
    """Returns ``block`` if it is a content block of one of the types ``kinds``.

    Raises RequestError naming ``place``.
    """
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise RequestError(f"{place}: {shown(kind)} isn't a type that is read here", hint=f"It is {', '.join(kinds)}.")
    return _known(place, block, ("type", *_HINTS, *_BLOCKS[kind]))


def _text(place: str, block: Mapping[str, Any], name: str = "text") -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise RequestError(f"{place}: its {name} isn't a text", hint="Pass a text.")
    return text


def _system(
    system: str | Sequence[Mapping[str, Any]] | None, unsupported: Unsupported
) -> tuple[list[dict[str, Any]], bool]:
    """Returns a list with the system message, or an empty list, and True if a billing line was removed."""
    blocks = [system] if isinstance(system, str) else list(system or ())
    texts, left_out = [], False
    for i, block in enumerate(blocks):
        place = f"system[{i}]"
        text = block if isinstance(block, str) else _text_or_note(place, block, unsupported)
        rest = _BILLING.sub("", text)
        left_out |= rest != text
        texts += [rest] if rest or rest == text else []
    return [{"role": "system", "content": _joined(texts)}] if texts else [], left_out


def _joined(texts: Sequence[str]) -> str | list[dict[str, str]]:
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _is_of_user(message: Mapping[str, Any]) -> bool:
    """Returns True for a message of the user; False for one that has only results of tools."""
    content = message.get("content")
    results = isinstance(content, list) and content and all(type_of(block) == "tool_result" for block in content)
    return message.get("role") == "user" and not results


def _message(
    i: int, message: Mapping[str, Any], unsupported: Unsupported, refused: bool = False
) -> list[dict[str, Any]]:
    """Converts a message to a list of OpenAI's messages, with a separate message for each tool result.

    Args:
        i: index of the message in the body.
        message: the message.
        unsupported: the list that replaced blocks are added to.
        refused: True for the user's last message, where an unsupported block is an error instead of being replaced.

    Raises RequestError naming the block.
    """
    role, content, place = message.get("role"), message.get("content"), f"messages[{i}]"
    _known(place, message, ("role", "content"))
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{place}: its role is {shown(role)}", hint='It is "user" or "assistant".')
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"{place}: its content is missing", hint="Pass a text, or a list of blocks.")
    kinds = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}[role]
    messages: list[dict[str, Any]] = []
    texts, thoughts, calls = [], [], []
    for j, part in enumerate(content):
        spot = f"{place}.content[{j}]"
        if (kind := type_of(part)) is not None and kind not in _BLOCKS:
            texts.append(unsupported.note(spot, kind, refused))
            continue
        block = _block(spot, part, kinds)
        if block["type"] == "text":
            texts.append(_text(spot, block))
        elif block["type"] == "thinking":
            thoughts.append(_text(spot, block, "thinking"))
        elif block["type"] == "tool_use":
            function = {"name": _text(spot, block, "name"), "arguments": block.get("input")}
            calls.append({"id": _text(spot, block, "id"), "type": "function", "function": function})
        else:
            called = _text(spot, block, "tool_use_id")
            messages.append({"role": "tool", "tool_call_id": called, "content": _result(spot, block, unsupported)})
    if role != "assistant":
        return [*messages, *([{"role": role, "content": _joined(texts)}] if texts or not messages else [])]
    turn: dict[str, Any] = {"role": role, "content": _joined(texts) if texts else ""}
    turn |= {"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}
    return [turn | ({"tool_calls": calls} if calls else {})]


def _text_or_note(place: str, block: Any, unsupported: Unsupported) -> str:
    """Returns the text of a block, or the note that replaces a block of another type."""
    kind = type_of(block)
    if kind is None or kind == "text":
        return _text(place, _block(place, block, ("text",)))
    return unsupported.note(place, kind)


def _result(place: str, block: Mapping[str, Any], unsupported: Unsupported) -> str | list[dict[str, str]]:
    content = block.get("content")
    if isinstance(content, str):
        return content
    if content is not None and not isinstance(content, list):
        raise RequestError(f"{place}: its content isn't a text", hint="Pass a text, or a list of texts.")
    texts = [_text_or_note(f"{place}.content[{k}]", one, unsupported) for k, one in enumerate(content or ())]
    if not texts:
        return "error" if block.get("is_error") else ""
    return _joined(texts)


def _tool(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tool ``i`` in OpenAI's format.

    Raises RequestError for a tool that Anthropic's servers run themselves.
    """
    kind, place = tool.get("type"), f"tools[{i}]"
    if kind not in (None, "custom"):
        raise RequestError(f"{place}: {shown(kind)} isn't run for a client", hint="Describe it by its input_schema.")
    names = ("type", "name", "description", "input_schema", "strict", "eager_input_streaming", *_HINTS)
    nothing = {"defer_loading": False, "allowed_callers": ["direct"]}  # values that ask for nothing
    used = {name: value for name, value in tool.items() if name not in nothing or value != nothing[name]}
    fields = _known(place, used, names)
    function = {
        "name": fields.get("name"),
        "description": fields.get("description"),
        "parameters": fields.get("input_schema"),
    }
    return {"type": "function", "function": function | {"strict": bool(fields.get("strict"))}}


def _choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool | None]:
    """Converts Anthropic's ``tool_choice`` to OpenAI's ``tool_choice`` and ``parallel_tool_calls``.

    Raises RequestError.
    """
    if choice is None:
        return None, None
    fields = _known("tool_choice", choice, ("type", "name", "disable_parallel_tool_use"))
    kind, name = fields.get("type"), fields.get("name")
    parallel = False if fields.get("disable_parallel_tool_use") else None
    if kind == "tool" and isinstance(name, str):
        return {"type": "function", "function": {"name": name}}, parallel
    if kind in ("auto", "any", "none"):
        return {"any": "required"}.get(kind, kind), parallel
    raise RequestError(f"tool_choice: {shown(choice)} isn't a choice", hint="Its type is auto, any, tool or none.")


class MessagesShape(Shape):
    """The response of ``/v1/messages``. A whole response and a stream are made of the same content blocks."""

    prefix, call_prefix = "msg_", "toolu_"
    keep_alive = event({"type": "ping"}, "ping")

    def __init__(self, asked: MessagesBody, *args: Any) -> None:
        super().__init__(*args)
        self._asked = asked
        self._blocks: list[dict[str, Any]] = []
        self._open = False
        self._finish: str | None = None
        self._stop: int | str | None = None

    def _message(self, usage: Mapping[str, Any], ended: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"id": self.id, "type": "message", "role": "assistant", "model": self._model}
        reason, sequence = self._stopped(usage) if ended else (None, None)
        message |= {"content": self._blocks if ended else [], "stop_reason": reason, "stop_sequence": sequence}
        return message | {"usage": self._usage(usage)}

    def _usage(self, usage: Mapping[str, Any]) -> dict[str, int]:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    def _stopped(self, usage: Mapping[str, Any]) -> tuple[str, str | None]:
        if self._finish == "stop" and isinstance(self._stop, str):
            return "stop_sequence", self._stop
        most = self._asked.max_tokens
        if self._finish == "length" and most is not None and usage["completion_tokens"] < most:
            return "model_context_window_exceeded", None
        return _STOPS.get(self._finish or "", "end_turn"), None

    def _take(self, news: News) -> list[dict[str, Any]]:
        """Adds new tokens to the content blocks, and returns the events that tell a client about the additions."""
        events: list[dict[str, Any]] = []
        for delta in news.deltas:
            kind = "thinking" if delta.reasoning else "text" if delta.call is None else "tool_use"
            if not self._open or self._blocks[-1]["type"] != kind or delta.name is not None:
                events += self._closed()
                begin: dict[str, Any] = {"type": kind}
                if kind == "tool_use":
                    begin |= {"id": delta.id, "name": delta.name, "input": {}}
                else:
                    begin |= {kind: "", **({"signature": ""} if kind == "thinking" else {})}
                self._blocks.append({**begin, "input": ""} if kind == "tool_use" else dict(begin))
                self._open = True
                at = len(self._blocks) - 1
                events.append({"type": "content_block_start", "index": at, "content_block": begin})
            block, at = self._blocks[-1], len(self._blocks) - 1
            if kind == "tool_use":
                addition, change = delta.arguments, {"type": "input_json_delta", "partial_json": delta.arguments}
                block["input"] += addition
            elif kind == "thinking":
                addition = "" if self._asked.omits else delta.reasoning
                change = {"type": "thinking_delta", "thinking": addition}
                block["thinking"] += addition
            else:
                addition, change = delta.content, {"type": "text_delta", "text": delta.content}
                block["text"] += addition
            if addition:
                events.append({"type": "content_block_delta", "index": at, "delta": change})
        if news.finish_reason is not None:
            self._finish = news.finish_reason
            events += self._closed()
        return events

    def _closed(self) -> list[dict[str, Any]]:
        """Ends the open block, if there is one, and returns the events for its end."""
        if not self._open:
            return []
        block, at = self._blocks[-1], len(self._blocks) - 1
        self._open = False
        events: list[dict[str, Any]] = []
        if block["type"] == "tool_use":
            block["input"] = call_arguments(block["input"]) or {}  # none if it was cut off, as stop_reason says
        elif block["type"] == "thinking":
            signature = {"type": "signature_delta", "signature": block["signature"]}
            events.append({"type": "content_block_delta", "index": at, "delta": signature})
        return [*events, {"type": "content_block_stop", "index": at}]

    def add(self, index: int, news: News, one: Finished, ended: Ended, given: Given) -> None:
        """Sets the only answer. The arguments are those of `Shape.add`."""
        self._take(news)
        self._stop = one.stop_reason

    def response(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the whole response as a JSON object."""
        return self._message(usage, ended=True)

    def start(self, prompt: int) -> bytes:
        """Returns the first events of a stream; ``prompt`` is the number of the prompt's tokens."""
        counts = {"prompt_tokens": prompt, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}
        begin = {"type": "message_start", "message": self._message(counts, ended=False)}
        return event(begin, "message_start") + self.keep_alive

    def news(self, index: int, news: News, usage: dict[str, Any] | None) -> bytes:
        """Returns the events for new tokens."""
        return b"".join(event(one, one["type"]) for one in self._take(news))

    def end(self, usage: dict[str, Any], ended: Sequence[Ended]) -> bytes:
        """Returns the last events of a stream. The arguments are those of `Shape.end`."""
        self._stop = next((one.stop_reason for end in ended for one in end.result.answers), None)
        reason, sequence = self._stopped(usage)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        last = {"type": "message_delta", "delta": delta, "usage": self._usage(usage)}
        return event(last, "message_delta") + event({"type": "message_stop"}, "message_stop")

    def failed(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that fails with ``error``."""
        return event(error.body_for("/v1/messages"), "error")


def add_messages(routes: Routes, front: Front) -> None:
    """Adds Anthropic's endpoints to ``routes``; ``front`` has the models."""

    @routes.post("/v1/messages")
    async def messages(request: Request) -> Response:
        """Answers a conversation, in Anthropic's format."""
        messages_body, ignored, charge = await front.body(request, MessagesBody)

        def order(model: Model) -> Order:
            if messages_body.max_tokens is None:
                raise RequestError("max_tokens: it is missing", hint="Say how many tokens the answer may have.")
            body, more, left_out = messages_body.chat()
            notes = {LEFT_OUT_HEADER: "x-anthropic-billing-header"} if left_out else {}
            return Order(body, partial(MessagesShape, messages_body), [*ignored, *more], notes)

        return await answer(front, request, charge, messages_body.model, order)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        """Counts the prompt tokens of a request to ``/v1/messages`` with the same body."""
        return json_response({"input_tokens": await counted(front, request, CountBody, lambda asked: asked.chat()[0])})
