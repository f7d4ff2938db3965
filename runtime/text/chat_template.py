"""Renders chat templates as transformers' ``apply_chat_template`` does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from enginewright.runtime.bundle.tokenizer_files import CHAT_TEMPLATE_PATH

from ..shared.errors import BundleError, RequestError, meant, meant_in, shown
from .template_process import StoppedError, template_process
from .tool_schema import tool_schema

Message = Mapping[str, Any]
"""One turn: "role" and "content", and what else the template reads (tool calls, reasoning)."""

Tool = Mapping[str, Any] | Callable[..., Any]
"""A JSON schema; or a function with type hints and a docstring in Google's style, from which a schema is made."""

# What models and interfaces call a turn's reasoning; templates read the first, some of them the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_ROLES = ("system", "user", "assistant")
_TEXTS = ("text", "input_text", "output_text")  # types of OpenAI's parts that are text
_OPTIONS = ("tools", "documents", "add_generation_prompt", "continue_final_message")  # of ``ChatTemplate.render``
_SEEN = "SeenByTheTemplate"
_END_OF_MESSAGE = "CONTINUE_FINAL_MESSAGE_TAG "  # ends in a space, to see whether the template trims


class ChatTemplate:
    """A chat template. A separate process renders it, within limits: see ``template_process``.

    Args:
        source: its Jinja text.
        special_tokens: variables of the template (bos_token, eos_token, ...).
        name: the template's file, for messages.

    Attributes:
        source: its Jinja text.

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
        names = json.loads(text)
        self._reads = frozenset(names["variables"])  # variables
        self._words = frozenset(names["words"])  # texts that it has, and names of fields
        self._roles = sorted({*_ROLES, *names["roles"]})
        self._shows: dict[str, bool] = {}  # what ``_shown`` found out
        self.source = source
        self._name = name
        self._variables = {k: v for k, v in special_tokens.items() if isinstance(v, str)}

    @property
    def reads(self) -> frozenset[str]:
        """Names of the variables that the template reads."""
        return self._reads

    def with_source(self, source: str, variable: Callable[[str], str]) -> ChatTemplate:
        """Returns a copy with the text ``source``, whose variables are each changed by ``variable``."""
        return ChatTemplate(source, {k: variable(v) for k, v in self._variables.items()}, name=self._name)

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
        """Returns the text of a conversation.

        Args:
            messages: the turns.
            tools: functions that the model may call.
            documents: texts that the model may refer to; usually with "title" and "text".
            add_generation_prompt: True ends the text with the start of the assistant's turn; None means True unless the
                last message is continued.
            continue_final_message: True ends the text within the last message, so that the model continues it; a
                field's name continues that field instead of "content".
            variables: further variables of the template, such as ``enable_thinking``. They replace special tokens of
                the same name.

        Raises:
            RequestError: the template refuses the messages (the text names the line) or takes too much time or memory,
                or an argument isn't plain data.
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

    def checked(
        self, messages: Sequence[Message], variables: Mapping[str, Any], of_params: Collection[str] = ()
    ) -> list[dict[str, Any]]:
        """Returns the messages for ``render``, after a check that the template reads everything that is passed.

        Text parts as in OpenAI's API become one text if the template needs that. The role "developer", OpenAI's newer
        name of "system", becomes "system" if the template doesn't read it.

        Args:
            messages: the turns.
            variables: the other arguments of ``render``.
            of_params: names that belong in SamplingParams, for a hint.

        Raises:
            RequestError: the template doesn't read a role, a variable, the tools or the documents, or a part isn't
                text.
        """
        _check_messages(messages)
        for name, value in variables.items():
            self._check_variable(name, value, of_params)
        checked = []
        for i, message in enumerate(messages):
            plain: dict[str, Any] = _plain(message)
            if plain["role"] == "developer" and not self._knows("developer"):
                plain["role"] = "system"
            self._check_message(i, plain)
            if isinstance(plain.get("content"), (list, tuple)):
                plain["content"] = self._of_parts(i, plain["content"])
            checked.append(plain)
        return checked

    def _check_variable(self, name: str, value: Any, of_params: Collection[str]) -> None:
        asks = value is not None and not (type(value) in (str, list, tuple, dict) and not value)
        if name in self._reads or not asks or (name in _OPTIONS and name not in ("tools", "documents")):
            return
        if name in ("tools", "documents"):
            raise RequestError(
                f"chat: {name}: the model's template doesn't read them ({self._name})",
                hint="Describe them in a message, or take a model that was trained with them.",
            )
        known = sorted(self._reads - {"messages", "add_generation_prompt", *self._variables})
        hint = f"{meant(name, known)}It reads {', '.join(known) or 'no others'}."
        if name in of_params:
            hint = f"Pass SamplingParams({name}=...)."
        raise RequestError(f"chat: {name}: the model's template has no such variable ({self._name})", hint=hint)

    def _knows(self, role: str) -> bool:
        return role in self._roles or role in self._words

    def _check_message(self, i: int, message: Mapping[str, Any]) -> None:
        role = message["role"]
        if not self._knows(role):
            raise RequestError(
                f"chat: message {i} has the role {shown(role)}, which the model's template doesn't know ({self._name})",
                hint=f"{meant(role, self._roles)}It knows {', '.join(self._roles)}.",
            )
        if role == "system" and not self._shown("system"):
            raise RequestError(
                f"chat: message {i}: the model's template leaves system messages out ({self._name})",
                hint="Say it in the user's message.",
            )
        if message.get("tool_calls") and "tool_calls" not in self._words:
            raise RequestError(
                f"chat: message {i}: the model's template doesn't read its tool_calls ({self._name})",
                hint="Say in its content what was called.",
            )

    def _of_parts(self, i: int, parts: Sequence[Any]) -> str | list[dict[str, str]]:
        texts = []
        for j, part in enumerate(parts):
            kind = part.get("type") if isinstance(part, Mapping) else "text"
            text = part.get("text") if isinstance(part, Mapping) else part
            if kind not in _TEXTS or not isinstance(text, str):
                what = f"is of type {shown(kind)}" if kind not in _TEXTS else "has no text"
                raise RequestError(
                    f"chat: message {i}: part {j} of its content {what}; models take text alone here",
                    hint=(meant_in(part, "text") if isinstance(part, Mapping) else "")
                    + 'Parts look like {"type": "text", "text": "Hello"}.',
                )
            texts.append(text)
        if self._shown("parts"):
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)  # as vLLM joins them

    def _shown(self, what: str) -> bool:
        """Tests the template by one rendering, whose result is cached.

        Args:
            what: "system" returns True if the template shows a system message, or refuses the rendering. "parts"
                returns True if it renders a list of text parts like the text alone; False if it refuses the rendering.
        """
        if what not in self._shows:
            user = {"role": "user", "content": _SEEN}
            try:
                if what == "system":
                    messages = [{"role": "system", "content": _SEEN}, {"role": "user", "content": "-"}]
                    self._shows[what] = _SEEN in self.render(messages)
                else:
                    as_parts = {"role": "user", "content": [{"type": "text", "text": _SEEN}]}
                    self._shows[what] = self.render([as_parts]) == self.render([user])
            except RequestError:
                self._shows[what] = what == "system"
        return self._shows[what]

    def _render(self, **data: Any) -> str:
        try:
            kind, text = template_process.ask(self.source, data)
        except StoppedError as e:
            raise RequestError(
                f"chat: the model's template was stopped ({self._name}): {e}",
                hint="Shorten the messages. In Python, chat_template is the text of another template.",
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
        """Adds a mark after the text that the model is to continue, in place. Returns that text.

        Args:
            message: the last message.
            which: the field to continue; True is "content".
        """
        field = which if isinstance(which, str) else "content"
        value = message.get(field)
        text = _last_text(value)
        if text is None:
            raise RequestError(
                f"chat: continue_final_message: the last message has no text in {field!r}",
                hint="Give it the beginning of the answer.",
            )
        fields = [f for f in _REASONING if message.get(f) == value] if field in _REASONING else [field]
        if not any(f in self.source for f in fields):
            raise RequestError(f"chat: continue_final_message: the model's template doesn't read {field!r}")
        for name in fields:
            if isinstance(value, str):
                message[name] = value + _END_OF_MESSAGE
            else:
                block = next(b for b in reversed(message[name]) if "text" in b)
                block["text"] += _END_OF_MESSAGE
        return text


def _last_text(value: object) -> str | None:
    """Returns a message's text, or the last text among its parts."""
    if isinstance(value, list):
        value = next((b["text"] for b in reversed(value) if isinstance(b, dict) and "text" in b), None)
    return value if isinstance(value, str) else None


def _cut(text: str, final: str) -> str:
    """Returns the part of the rendered ``text`` before the mark that ``_mark_end`` added after ``final``."""
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
                hint=(meant_in(message, "role") if isinstance(message, Mapping) else "")
                + 'Messages look like {"role": "user", "content": "Hello"}.',
            )


def _listed(name: str, value: Sequence[Any]) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(f"chat: {name} must be a list, not {shown(value)}")
    return value


def _checked_documents(documents: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not all(isinstance(d, Mapping) for d in _listed("documents", documents)):
        raise RequestError("chat: documents must be a list of dicts", hint='Such as {"title": "A", "text": "B"}.')
    return documents


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with its reasoning under all names that templates use."""
    reasoning = next((message[field] for field in _REASONING if message.get(field) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Returns a copy of ``value`` that has only JSON's types and tuples; the sandbox wouldn't stop other objects'
    methods.

    Raises RequestError if another type occurs.
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
        f"chat: not plain data: {shown(value)} is a {type(value).__name__}",
        hint="Pass strings, numbers, lists and dicts.",
    )
