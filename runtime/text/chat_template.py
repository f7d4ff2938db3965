"""Renders chat templates as transformers' ``apply_chat_template`` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from enginewright.plugins.shared.errors import BundleError, RequestError
from enginewright.runtime.bundle.tokenizer_files import CHAT_TEMPLATE_PATH

from .template_process import StoppedError, template_process
from .tool_schema import tool_schema

Message = Mapping[str, Any]
"""One turn: "role" and "content", and what else the template reads (tool calls, reasoning)."""

Tool = Mapping[str, Any] | Callable[..., Any]
"""A JSON schema, or a function with type hints and a docstring in Google's style that one can be made of."""

# What models and interfaces call a turn's reasoning; templates read the first, some of them the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_END_OF_MESSAGE = "CONTINUE_FINAL_MESSAGE_TAG "  # ends in a space, to see whether the template trims


class ChatTemplate:
    """A template. A process of its own renders it, within limits: see ``template_process``.

    Args:
        source: its Jinja text.
        special_tokens: variables of the template (bos_token, eos_token, ...).
        name: the template's file, for messages.

    Raises:
        BundleError: ``source`` isn't a valid template; names the line.
        EnginewrightError: the process can't be started.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str | bool | None], *, name: str = CHAT_TEMPLATE_PATH
    ) -> None:
        try:
            kind, text = template_process.ask(source, None)
        except StoppedError as e:
            kind, text = "U", str(e)
        if kind == "S":
            line, _, problem = text.partition(" ")
            raise BundleError(f"{name}: line {line}: {problem}", hint="Export the bundle again.")
        if kind != "T":
            raise BundleError(f"{name}: it can't be compiled: {text}", hint="Export the bundle again.")
        self._source = source
        self._name = name
        self._variables = {k: v for k, v in special_tokens.items() if isinstance(v, str)}

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: the turns.
            tools: functions that the model may call.
            documents: what the model may refer to; usually with "title" and "text".
            add_generation_prompt: end with the start of the assistant's turn; None does, unless the last is continued.
            continue_final_message: end within the last message, for the model to continue with it; a field's name
                continues that field instead of "content".
            variables: what else the template reads, for example ``enable_thinking``; they go before special tokens.

        Raises:
            RequestError: the template refuses the messages (names its line) or takes too much time or memory, or
                something isn't plain data.
            EnginewrightError: the process that renders can't be started.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "chat: continue_final_message and add_generation_prompt are both set",
                hint="The answer either continues the last message or is one of its own.",
            )
        _check_messages(messages)
        # Templates can do with a key that is missing, where they would write "None" for one that is.
        chat: list[dict[str, Any]] = [
            _with_reasoning(_plain({k: v for k, v in m.items() if v is not None})) for m in messages
        ]
        final = self._mark_end(chat[-1], continue_final_message) if continue_final_message else None
        data = {
            **self._variables,
            **_plain(variables),
            "tools": None if tools is None else _plain([tool_schema(tool) for tool in _listed("tools", tools)]),
            "documents": None if documents is None else _plain(_checked_documents(documents)),
        }
        text = self._render(messages=chat, add_generation_prompt=add_generation_prompt, **data)
        return text if final is None else _cut(text, final)

    def _render(self, **data: Any) -> str:
        try:
            kind, text = template_process.ask(self._source, data)
        except StoppedError as e:
            raise RequestError(
                f"chat: the model's template was stopped ({self._name}): {e}",
                hint="Shorten the messages, or pass chat_template with the text of another template.",
            ) from e
        if kind == "T":
            return text
        line, _, problem = text.partition(" ")
        where = self._name if line == "0" else f"{self._name}, line {line}"
        raise RequestError(
            f"chat: the model's template refuses these messages ({where}): {problem}",
            hint="Look at roles, their order, and each message's content.",
        )

    def _mark_end(self, message: dict[str, Any], which: bool | str) -> str:
        """Puts a mark behind the text that is to be continued; returns that text."""
        field = which if isinstance(which, str) else "content"
        value = message.get(field)
        text = _last_text(value)
        if text is None:
            raise RequestError(
                f"chat: continue_final_message: the last message has no text in {field!r}",
                hint="Give it the beginning of the answer.",
            )
        fields = [f for f in _REASONING if message.get(f) == value] if field in _REASONING else [field]
        if not any(f in self._source for f in fields):
            raise RequestError(f"chat: continue_final_message: the model's template doesn't read {field!r}")
        for name in fields:
            if isinstance(value, str):
                message[name] = value + _END_OF_MESSAGE
            else:
                block = next(b for b in reversed(message[name]) if "text" in b)
                block["text"] += _END_OF_MESSAGE
        return text


def _last_text(value: object) -> str | None:
    """A message's text, or the last text among its parts."""
    if isinstance(value, list):
        value = next((b["text"] for b in reversed(value) if isinstance(b, dict) and "text" in b), None)
    return value if isinstance(value, str) else None


def _cut(text: str, final: str) -> str:
    """The rendered text up to the mark behind the message that is continued."""
    mark = _END_OF_MESSAGE.strip()
    if mark not in text or final.strip() not in text:
        raise RequestError(
            "chat: continue_final_message: the model's template leaves the last message out, or alters it",
            hint="End with a message of the assistant, without what the template drops (such as reasoning).",
        )
    at = text.rindex(mark)
    # If the template has trimmed the space behind the mark, it would have trimmed the message's own too.
    return text[:at] if text.startswith(_END_OF_MESSAGE, at) else text[:at].rstrip()


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise RequestError("chat: there are no messages", hint="Pass at least one message.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"chat: message {i} has no role",
                hint='Messages look like {"role": "user", "content": "Hello"}.',
            )


def _listed(name: str, value: Sequence[Any]) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(f"chat: {name} must be a list, not {value!r:.80}")
    return value


def _checked_documents(documents: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not all(isinstance(d, Mapping) for d in _listed("documents", documents)):
        raise RequestError("chat: documents must be a list of dicts", hint='Such as {"title": "A", "text": "B"}.')
    return documents


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read."""
    reasoning = next((message[field] for field in _REASONING if message.get(field) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy of ``value`` of nothing but JSON's types and tuples: other objects have methods that a sandbox lets by.

    Raises RequestError for what is not made of them.
    """
    try:
        return _copy_plain(value)
    except RecursionError as e:
        raise RequestError("chat: not plain data: it contains itself, or is nested too deep") from e


def _copy_plain(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # and no enum or other subclass
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, np.generic):
        return _copy_plain(value.item())
    if isinstance(value, Mapping):
        return {_copy_plain(k): _copy_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy_plain(v) for v in value) if type(value) is tuple else [_copy_plain(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _copy_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic
        return _copy_plain(dump())
    raise RequestError(
        f"chat: not plain data: {value!r:.80} is a {type(value).__name__}",
        hint="Pass strings, numbers, lists and dicts.",
    )
