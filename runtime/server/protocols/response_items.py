"""Bodies of ``/v1/responses``, and how their items become the messages of chat completions."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ...requests.vllm_names import Only
from ...shared.errors import RequestError, meant, shown
from ..http.errors import NO_ITEM, ApiError
from ..http.fields import Fields, check_parts
from .bodies import MOST_TOP_LOGPROBS, ChatBody, StreamOptions
from .unsupported import Unsupported, type_of

_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = frozenset(
    {
        *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
        *("web_search_call.action.sources", "message.input_image.image_url", "code_interpreter_call.outputs"),
        *("computer_call_output.output.image_url",),
    }
)
"""Values of ``include`` that have no effect here. An item of reasoning always has its text."""
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_LATER = "it isn't supported yet"


class ResponseFields(Fields, kw_only=True):
    """The fields that ``/v1/responses`` and ``/v1/responses/input_tokens`` share."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None

    refused: ClassVar[Mapping[str, Only]] = {
        "background": Only((None, False), _LATER, "Stream the answer."),
        "background_options": Only((None, {}), _LATER, "Leave it out."),
        "conversation": Only((None,), "the server stores no conversations by name", "Use previous_response_id."),
        "prompt": Only((None,), "the server stores no prompts", "Write the prompt into instructions and input."),
        "context_management": Only((None, []), "conversations are never shortened", "Leave out old items."),
        "image": Only((None, {}), "models answer only with text", "Leave it out."),
        "personality": Only((None,), _LATER, "Describe it in the instructions."),
    }
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            *("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "moderation"),
            *("prompt_cache_options", "max_tool_calls", "access_programs", "client_metadata"),
        }
    )


class ResponsesBody(ResponseFields, kw_only=True):
    """The body of ``/v1/responses``. OpenAI has no ``seed``."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    seed: int | None = None


class InputTokensBody(ResponseFields, kw_only=True):
    """The body of ``/v1/responses/input_tokens``."""


def chat_of(body: ResponsesBody | InputTokensBody, items: Sequence[Mapping[str, Any]]) -> tuple[ChatBody, list[str]]:
    """Converts the body to one of chat completions. Returns it with the names of ignored fields. Raises RequestError.

    Args:
        body: the body.
        items: the conversation: the items of the previous responses, then those of the body.
    """
    tools, ignored = _offered(body.tools, body.tool_choice)
    if body.truncation not in (None, "disabled", "auto"):
        raise RequestError(f"truncation: {shown(body.truncation)} isn't known", hint='Pass "auto" or "disabled".')
    ignored += ["truncation"] if body.truncation == "auto" else []  # a context is never cut
    effort, form = _effort_and_form(body, ignored)
    messages, replaced = messages_of(items, body.instructions)
    chat = ChatBody(
        messages=messages,
        model=body.model,
        tools=tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=form,
        reasoning_effort=effort,
    )
    if isinstance(body, ResponsesBody):
        _sample_as(body, chat)
    return chat, ignored + replaced


_PARTS = {
    "text": ("format", ("verbosity",)),
    "reasoning": ("effort", ("summary", "generate_summary", "context", "mode")),
}
"""Field whose value is an object -> the part of it that is used, and the parts that are ignored."""


def _effort_and_form(
    body: ResponsesBody | InputTokensBody, ignored: list[str]
) -> tuple[str | None, dict[str, Any] | None]:
    """Returns the reasoning effort and the form of the answer; None for each that the body doesn't set.

    Adds the names of ignored parts to ``ignored``. Raises RequestError for an unknown part, and for a wrong value.
    """
    text, reasoning = body.text or {}, body.reasoning or {}
    for name, parts in (("text", text), ("reasoning", reasoning)):
        honoured, harmless = _PARTS[name]
        check_parts(name, parts, (honoured, *harmless))
        ignored += [f"{name}.{part}" for part, value in parts.items() if part != honoured and value is not None]
    effort, form = reasoning.get("effort"), text.get("format")
    if not isinstance(effort, str | None):
        raise RequestError(f"reasoning: effort: {shown(effort)} isn't an effort", hint='Such as "low".')
    if not isinstance(form, Mapping | None):
        raise RequestError(f"text: format: {shown(form)} isn't a format", hint='Such as {"type": "json_object"}.')
    return effort, None if form is None else dict(form)


def _sample_as(body: ResponsesBody, chat: ChatBody) -> None:
    """Copies the sampling parameters to a body of chat completions. Raises RequestError naming the field."""
    include = set(body.include or ())
    if unknown := include - _INCLUDES - {_LOGPROBS}:
        raise RequestError(f"include: {shown(min(unknown))} isn't known", hint=f"It may have {_LOGPROBS}.")
    chat.max_tokens, chat.temperature, chat.top_p = body.max_output_tokens, body.temperature, body.top_p
    chat.stream, chat.seed = body.stream, body.seed
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MOST_TOP_LOGPROBS:
        hint = f"It must be from 0 to {MOST_TOP_LOGPROBS}."
        raise RequestError(f"top_logprobs: {body.top_logprobs} is out of range", hint=hint)
    if _LOGPROBS in include:
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs
    elif body.top_logprobs:
        raise RequestError("top_logprobs: nothing shows them", hint=f'Add "{_LOGPROBS}" to include.')


def _offered(tools: Any, choice: Any) -> tuple[list[Any] | None, list[str]]:
    """Returns the tools for the model, and the names of the omitted ones.

    A tool of a namespace gets a unique name. Tools that OpenAI runs itself are omitted, since agents always send them.
    Raises RequestError if ``choice`` is an omitted tool.
    """
    if not isinstance(tools, list):
        return tools, []
    offered: list[Any] = []
    ignored = []
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind == "namespace" and isinstance(inner := tool.get("tools"), list):
            offered += [_in_namespace(tool.get("name"), one) for one in inner]
        elif isinstance(kind, str) and kind.startswith(_HOSTED):
            if isinstance(choice, Mapping) and choice.get("type") == kind:
                raise RequestError(f"tool_choice: nobody runs {shown(kind)} here", hint="Choose a function.")
            ignored.append(f"tools[{i}] ({kind})")
        else:
            offered.append(tool)
    return offered, ignored


def _in_namespace(space: Any, tool: Any) -> Any:
    if not isinstance(tool, Mapping) or not isinstance(space, str):
        return tool
    return {**tool, "name": f"{space}{NAMESPACE_SEPARATOR}{tool.get('name')}"}


NAMESPACE_SEPARATOR = "__"
_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp", "tool_search")
"""Beginnings of the types of tools that run on the server, which this one doesn't offer."""


def items_of(
    sent: str | Sequence[Mapping[str, Any]] | None,
    stored: Callable[[str], Mapping[str, Any] | None] = lambda name: None,
) -> list[dict[str, Any]]:
    """Returns a body's ``input`` as items, each with an id.

    Args:
        sent: the field's value: a text, or items.
        stored: returns the stored item with an id, by which a reference is replaced; None if there is none.

    Raises RequestError, and ApiError for a reference to an unknown item.
    """
    if sent is None:
        raise RequestError("input: it is missing", hint="Pass a text, or a list of items.")
    if isinstance(sent, str):
        sent = [{"role": "user", "content": sent}]
    items = []
    for i, item in enumerate(sent):
        kind = item.get("type")
        if kind is None:
            kind = "message" if "role" in item else _REFERENCE if "id" in item else None
        if kind == _REFERENCE:
            items.append(dict(_referenced(i, item.get("id"), stored)))
            continue
        if not isinstance(kind, str):
            hint = f"It is {', '.join((*_PREFIXES, _REFERENCE))}."
            raise RequestError(f"input[{i}]: {shown(kind)} isn't a type of item", hint=hint)
        whole = dict(item) | {"type": kind}
        if not isinstance(whole.get("id"), str):
            whole["id"] = new_id(kind)
        if kind == "message" and isinstance(whole.get("content"), str):
            part = "output_text" if whole.get("role") == "assistant" else "input_text"
            whole["content"] = [{"type": part, "text": whole["content"]}]
        items.append(whole)
    return items


def _referenced(i: int, name: Any, stored: Callable[[str], Mapping[str, Any] | None]) -> Mapping[str, Any]:
    """Returns the item that item ``i`` of the input refers to by its id ``name``.

    ``stored`` returns the item of an id, None for an unknown id. Raises RequestError if ``name`` is no text, and
    ApiError for an unknown id.
    """
    if not isinstance(name, str):
        raise RequestError(f"input[{i}]: a reference has no id", hint="Pass the id of an item of a stored response.")
    item = stored(name)
    if item is None:
        values = {"item": name[:80]}
        raise ApiError(404, "the item isn't there", param="input", problem=NO_ITEM, values=values)
    return item


_REFERENCE = "item_reference"
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
"""Type of an item -> the beginning of its ids."""


def new_id(kind: str) -> str:
    """Returns an id for a new item of a type."""
    return f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(16)}"


def messages_of(items: Sequence[Mapping[str, Any]], instructions: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the messages of a conversation, and the types of content that notes replace (see ``unsupported``).

    Consecutive reasoning, text and calls are one turn of the assistant. System messages at the beginning become one
    message, as templates need it. The user's last message is the last item with the role "user".

    Args:
        items: the conversation's items, as ``items_of`` returns them.
        instructions: the system's message before all others; None for none.

    Raises RequestError.
    """
    conversation = _Conversation(
        max((i for i, item in enumerate(items) if item["type"] == "message" and item.get("role") == "user"), default=-1)
    )
    for i, item in enumerate(items):
        conversation.add(i, item)
    messages, begin = conversation.messages, 0
    while begin < len(messages) and messages[begin]["role"] in ("system", "developer"):
        begin += 1
    system = [text for text in (instructions, *(one["content"] for one in messages[:begin])) if text]
    head = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    return [*head, *messages[begin:]], conversation.unsupported.replaced


class _Conversation:
    """Converts items, one after the other, to messages of chat completions.

    Args:
        last: index of the user's last message; -1 if there is none. In it, items that aren't text are refused.

    Attributes:
        messages: the messages so far.
        unsupported: the notes that replace content other than text.
    """

    def __init__(self, last: int) -> None:
        self._last = last
        self.messages: list[dict[str, Any]] = []
        self.unsupported = Unsupported()
        self._turn: dict[str, Any] | None = None  # the assistant's, which may go on
        self._noted = False  # the turn's content is notes, which the assistant's text may follow

    def add(self, i: int, item: Mapping[str, Any]) -> None:
        """Adds item ``i``. Raises RequestError."""
        answer = item["type"] == "message" and item.get("role") == "assistant"
        add = _Conversation._add_answer if answer else self._ADDERS.get(item["type"], _Conversation._add_other)
        add(self, i, f"input[{i}]", item)

    def _assistant(self, ends: bool) -> dict[str, Any]:
        """Returns the assistant's turn; a new turn if there is none, or if ``ends`` is True."""
        if self._turn is None or ends:
            self._turn, self._noted = {"role": "assistant", "content": ""}, False
            self.messages.append(self._turn)
        return self._turn

    @property
    def _has_text(self) -> bool:
        """True if the assistant's turn has text of the model, and not only notes."""
        return bool(self._turn and self._turn["content"] and not self._noted)

    # Each adds an item of some types. ``i``: its index; ``place``: its place in the body, for errors.

    def _add_reasoning(self, i: int, place: str, item: Mapping[str, Any]) -> None:
        parts = item.get("content") or item.get("summary") or []
        thoughts = _texts(f"{place}.content", parts, self.unsupported)
        turn = self._turn
        message = self._assistant(ends=turn is not None and (len(turn) > 2 or bool(turn["content"])))
        if thoughts:
            message["reasoning_content"] = thoughts

    def _add_call(self, i: int, place: str, item: Mapping[str, Any]) -> None:
        calls = self._assistant(ends=False).setdefault("tool_calls", [])
        name, number = _text(place, item, "name"), _text(place, item, "call_id")
        if isinstance(space := item.get("namespace"), str):
            name = f"{space}{NAMESPACE_SEPARATOR}{name}"
        if item["type"] == "custom_tool_call":
            call = {"type": "custom", "custom": {"name": name, "input": _text(place, item, "input")}}
        else:
            call = {"type": "function", "function": {"name": name, "arguments": _text(place, item, "arguments")}}
        calls.append({"id": number, **call})

    def _add_output(self, i: int, place: str, item: Mapping[str, Any]) -> None:
        self._turn = None
        output = item.get("output")
        content = output if isinstance(output, str) else _texts(f"{place}.output", output, self.unsupported)
        self.messages.append({"role": "tool", "tool_call_id": _text(place, item, "call_id"), "content": content})

    def _add_answer(self, i: int, place: str, item: Mapping[str, Any]) -> None:
        text = _texts(f"{place}.content", item.get("content"), self.unsupported)
        message = self._assistant(ends=self._has_text or bool(self._turn and "tool_calls" in self._turn))
        message["content"], self._noted = _joined(message["content"], text), False

    def _add_message(self, i: int, place: str, item: Mapping[str, Any]) -> None:
        self._turn = None
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise RequestError(f"{place}: its role is {shown(role)}", hint="It is user, assistant or system.")
        text = _texts(f"{place}.content", item.get("content"), self.unsupported, i == self._last)
        self.messages.append({"role": role, "content": text})

    def _add_other(self, i: int, place: str, item: Mapping[str, Any]) -> None:
        """Adds a note for an item that only OpenAI's servers can read.

        Raises RequestError for an item of an unknown type after the user's last message.
        """
        kind = item["type"]
        if i > self._last and not _SERVER_ITEMS.fullmatch(kind):
            hint = f"{meant(kind, (*_PREFIXES, _REFERENCE))}It is {', '.join((*_PREFIXES, _REFERENCE))}."
            raise RequestError(f"{place}: {shown(kind)} isn't a type of item that is read here", hint=hint)
        note = self.unsupported.note(place, kind)
        message = self._assistant(ends=self._has_text)
        message["content"], self._noted = _joined(message["content"], note), True

    _ADDERS: ClassVar[Mapping[str, Callable[[_Conversation, int, str, Mapping[str, Any]], None]]] = {
        "reasoning": _add_reasoning,
        **dict.fromkeys(("function_call", "custom_tool_call"), _add_call),
        **dict.fromkeys(("function_call_output", "custom_tool_call_output"), _add_output),
        "message": _add_message,
    }


_SERVER_ITEMS = re.compile(r".+_(?:call|output)|mcp_.+|compaction")
"""Types of items that OpenAI's servers make.

They don't belong to the user's message, even if they follow the last one.
"""


def _joined(text: str, more: str) -> str:
    return f"{text}\n{more}" if text and more else text or more


def _text(place: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{place}: its {name} isn't a text", hint="Pass it as it was given.")
    return value


def _texts(place: str, content: Any, unsupported: Unsupported, refused: bool = False) -> str:
    """Returns the text of an item's parts, with a note for each part that isn't text.

    Args:
        place: place of the parts in the body, for errors.
        content: the parts.
        unsupported: makes the notes.
        refused: True raises RequestError for a part that isn't text.
    """
    if not isinstance(content, list):
        raise RequestError(f"{place}: it is missing", hint="Pass a text, or a list of parts.")
    texts = []
    for j, part in enumerate(content):
        kind, spot = type_of(part), f"{place}[{j}]"
        if kind is not None and kind not in (*_TEXTS, "refusal"):
            texts.append(unsupported.note(spot, kind, refused))
            continue
        text = part.get("refusal" if kind == "refusal" else "text") if kind is not None else None
        if not isinstance(text, str):
            raise RequestError(f"{spot}: it has no text", hint='Parts look like {"type": "input_text", "text": "Hi"}.')
        texts.append(text)
    return "\n".join(texts)
