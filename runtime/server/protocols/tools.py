"""Converts tools and conversations with calls from each protocol to the form that chat templates and formats read.

A tool of any protocol becomes OpenAI's ``{"type": "function", "function": {...}}``. A custom tool, whose input is a
text, becomes a function with one parameter, ``input``; ``ToolChoice.custom`` has its name, so that its calls are
returned as calls of a custom tool.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ...shared.errors import RequestError, meant_in, shown
from ..http.limits import ARGUMENTS, LARGEST, value_of

MOST_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_INPUT = "input"
_SHORT = 9
_REASONING = ("reasoning_content", "reasoning")


@dataclass(frozen=True)
class ToolChoice:
    """The tools of a request, and which calls the request allows.

    Attributes:
        tools: functions, in OpenAI's format.
        mode: "none": no call; "auto": the model decides; "required": at least one.
        name: the tool that must be called, if ``mode`` is "required" and the request has one.
        parallel: True if there may be several calls.
        custom: names of the custom tools.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    parallel: bool = True
    custom: frozenset[str] = frozenset()

    @property
    def strict(self) -> bool:
        """True if at least one tool requires that its calls match its schema."""
        return any(tool["function"].get("strict") for tool in self.tools)

    @property
    def restricted(self) -> bool:
        """Returns True if some texts aren't valid answers: a call is required, or calls have a schema or a limit."""
        return (
            bool(self.tools) and self.mode != "none" and (self.mode == "required" or self.strict or not self.parallel)
        )

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """The tools that the template shows; None if there are none, or if no call is allowed."""
        if not self.tools or self.mode == "none":
            return None
        return [
            {"type": "function", "function": {k: v for k, v in tool["function"].items() if k != "strict"}}
            for tool in self.tools
        ]


def tool_choice(tools: Any, choice: Any = None, parallel: bool | None = None) -> ToolChoice:
    """Reads the fields ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of chat completions or of Responses.

    Raises RequestError naming the field.
    """
    if tools is not None and not isinstance(tools, list):
        raise RequestError(f"tools: {shown(tools)} isn't a list", hint="Pass a list of tools.")
    if (count := len(tools or ())) > MOST_TOOLS:
        raise RequestError(f"tools: there are {count:,}", hint=f"Pass {MOST_TOOLS:,} at most.")
    offered: dict[str, dict[str, Any]] = {}
    custom = set()
    for i, tool in enumerate(tools or ()):
        function, is_custom = _tool(f"tools[{i}]", tool)
        name = function["name"]
        if name in offered:
            raise RequestError(f"tools[{i}]: there are two of the name {shown(name)}", hint="Give each its own name.")
        offered[name] = {"type": "function", "function": function}
        if is_custom:
            custom.add(name)
    mode, name, only = _choice(choice)
    if only is not None:
        if unknown := [one for one in only if one not in offered]:
            raise RequestError(f"tool_choice: there is no tool {shown(unknown[0])}", hint="Name one of tools.")
        offered = {one: tool for one, tool in offered.items() if one in only}
    if name is not None and name not in offered:
        raise RequestError(f"tool_choice: there is no tool {shown(name)}", hint="Name one of tools.")
    if mode == "required" and not offered:
        raise RequestError("tool_choice: a call is required, and there are no tools", hint="Pass tools.")
    return ToolChoice(tuple(offered.values()), mode, name, parallel is not False, frozenset(custom))  # type: ignore[arg-type]


def _tool(place: str, tool: Any) -> tuple[dict[str, Any], bool]:
    """Returns a tool's function, and True if it is a custom tool."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind not in ("function", "custom"):
        what = f"the type {shown(kind)}" if kind is not None else "no type"
        raise RequestError(f"{place}: it has {what}", hint='Tools are of the type "function" or "custom".')
    fields = tool.get(kind, tool)  # Responses has the fields in the tool itself
    name = fields.get("name") if isinstance(fields, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        misspelled = "" if kind in tool else meant_in(tool, kind)
        misspelled = misspelled or (meant_in(fields, "name") if isinstance(fields, Mapping) else "")
        hint = f"{misspelled}A name has up to 128 letters, digits, underscores, dashes, dots, colons and slashes."
        raise RequestError(f"{place}: {shown(name)} isn't a name of a tool", hint=hint)
    about = fields.get("description")
    if about is not None and not isinstance(about, str):
        raise RequestError(f"{place}: its description isn't a text", hint="Pass a text.")
    if kind == "custom":
        return _custom(place, name, about, fields.get("format")), True
    parameters = fields.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"{place}: its parameters aren't a schema", hint='Pass {"type": "object", ...}.')
    schema = dict(parameters or {"type": "object", "properties": {}})
    function: dict[str, Any] = {"name": name, **({} if about is None else {"description": about}), "parameters": schema}
    if fields.get("strict"):
        function["strict"] = True
    return function, False


def _custom(place: str, name: str, about: str | None, form: Any) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    kind = form.get("type") if isinstance(form, Mapping) else None
    if form is not None and kind not in ("text", "grammar"):
        raise RequestError(f"{place}: {shown(kind)} isn't a format", hint='It is "text" or "grammar".')
    strict = False
    if kind == "grammar":
        grammar = form.get("grammar", form)
        syntax = grammar.get("syntax") if isinstance(grammar, Mapping) else None
        definition = grammar.get("definition") if isinstance(grammar, Mapping) else None
        if syntax != "regex" or not isinstance(definition, str):
            hint = 'The input of a custom tool is described by {"syntax": "regex", "definition": ...}.'
            raise RequestError(f"{place}: {shown(syntax)} isn't a syntax that a call's input can have", hint=hint)
        value["pattern"], strict = f"^(?:{definition})$", True
    schema = {"type": "object", "properties": {_INPUT: value}, "required": [_INPUT], "additionalProperties": False}
    function = {"name": name, "description": about or "", "parameters": schema}
    return function | ({"strict": True} if strict else {})


def _choice(choice: Any) -> tuple[str, str | None, list[str] | None]:
    """Reads ``tool_choice``. Returns (mode, the tool that must be called or None, the tools that may be called).

    The last is None if all tools may be called.
    """
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto", None, None
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind in ("function", "custom"):
        fields = choice.get(kind, choice)
        name = fields.get("name") if isinstance(fields, Mapping) else None
        if isinstance(name, str):
            return "required", name, None
    if kind == "allowed_tools":
        fields = choice.get(kind, choice)
        mode, tools = (fields.get("mode"), fields.get("tools")) if isinstance(fields, Mapping) else (None, None)
        if mode in ("auto", "required") and isinstance(tools, list):
            return mode, None, [_choice(one)[1] or "" for one in tools]
    hint = 'It is "none", "auto", "required", or {"type": "function", "function": {"name": ...}}.'
    raise RequestError(f"tool_choice: {shown(choice)} isn't a choice", hint=hint)


def custom_input(arguments: str) -> str:
    """Returns the text input of a custom tool's call; the arguments unchanged if they can't be parsed."""
    value = (call_arguments(arguments) or {}).get(_INPUT)
    return value if isinstance(value, str) else arguments


def call_arguments(text: str) -> dict[str, Any] | None:
    """Returns a call's arguments as an object; None if the text isn't one, for example because it was cut off.

    None also beyond the limits of bodies, as the client couldn't send such an answer back.
    """
    try:
        value = value_of("arguments", msgspec.Raw(text.encode() or b"{}"), LARGEST, ARGUMENTS)
    except RequestError:
        return None
    return value if isinstance(value, dict) else None


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages as templates read them: calls' arguments are objects, and a tool's result has the tool's
    name.

    Arguments that can't be parsed stay a text, as a cut-off call has them. An assistant's content may be missing.

    Raises RequestError naming the message, if another role has no content or a call is malformed.
    """
    checked, names = [], dict[str, str]()
    for i, message in enumerate(messages):
        checked_message, place = dict(message), f"messages[{i}]"
        if checked_message.get("content") is None:
            if checked_message.get("role") != "assistant":
                hint = meant_in(message, "content") + 'Write {"role": ..., "content": "..."}.'
                raise RequestError(f"{place}: its content is missing", hint=hint)
            checked_message["content"] = ""  # many templates write it without a look
        for name in _REASONING:
            if checked_message.get(name) is not None and not isinstance(checked_message[name], str):
                raise RequestError(f"{place}: its {name} isn't a text", hint="Pass it as it was given.")
        if checked_message.get("function_call"):
            raise RequestError(f"{place}: function_call is the older name of tool_calls", hint="Use tool_calls.")
        calls = checked_message.get("tool_calls")
        if not calls:
            checked_message.pop("tool_calls", None)
        elif not isinstance(calls, list):
            raise RequestError(f"{place}: its tool_calls aren't a list", hint="Pass them as they were given.")
        else:
            checked_message["tool_calls"] = [_call(f"{place}.tool_calls[{j}]", call) for j, call in enumerate(calls)]
            names |= {call["id"]: call["function"]["name"] for call in checked_message["tool_calls"] if "id" in call}
        called = checked_message.get("tool_call_id")
        if checked_message.get("role") == "tool" and isinstance(called, str) and called in names:
            checked_message.setdefault("name", names[called])
        checked.append(checked_message)
    return checked


def _call(place: str, call: Any) -> dict[str, Any]:
    """Returns a call with arguments as an object, or as a text if they can't be parsed."""
    kind = call.get("type", "function") if isinstance(call, Mapping) else None
    called = call.get(kind) if isinstance(kind, str) else None
    name = called.get("name") if isinstance(called, Mapping) else None
    if not isinstance(called, Mapping) or not isinstance(name, str):
        hint = 'Write {"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}.'
        raise RequestError(f"{place}: it isn't a call", hint=hint)
    arguments: Any = {_INPUT: called.get("input")} if kind == "custom" else called.get("arguments")
    if arguments is None:
        arguments = {}
    elif isinstance(arguments, str):
        parsed = call_arguments(arguments)
        arguments = arguments if parsed is None else parsed
    elif not isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call["id"], **function} if isinstance(call.get("id"), str) else function


def call_forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yields checked messages with their calls in each of the forms that templates read.

    First come the messages unchanged, then with all arguments as objects, whose items some templates iterate over, then
    with all arguments as JSON texts, which other templates join to texts. Last come the same three with ids of nine
    letters and digits, which Mistral's templates need. Messages without calls have one form.
    """
    yield messages
    if not any(message.get("tool_calls") for message in messages):
        return
    for form in (_as_object, _as_text):
        yield [_with_arguments(message, form) for message in messages]
    named = _with_short_ids(messages)
    yield named
    for form in (_as_object, _as_text):
        yield [_with_arguments(message, form) for message in named]


def _with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns messages whose calls have ids of nine letters and digits; results without an id answer in order."""
    changed: list[Mapping[str, Any]] = []
    open_ids: list[str] = []  # of calls without a result
    for i, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            calls = [{**call, "id": _short_id(call.get("id") or f"{i}-{j}")} for j, call in enumerate(calls)]
            open_ids = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool":
            called = message.get("tool_call_id")
            if isinstance(called, str) and called:
                called = _short_id(called)
            elif open_ids:
                called = open_ids[0]
            open_ids = [one for one in open_ids if one != called]
            message = {**message, "tool_call_id": called}
        changed.append(message)
    return changed


def _short_id(name: str) -> str:
    fits = len(name) == _SHORT and name.isascii() and name.isalnum()
    return name if fits else hashlib.blake2b(name.encode()).hexdigest()[:_SHORT]


def _with_arguments(message: Mapping[str, Any], form: Callable[[Any], Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append({**call, "function": {**function, "arguments": form(function["arguments"])}})
    return {**message, "tool_calls": calls}


def _as_object(arguments: Any) -> Mapping[str, Any]:
    return arguments if isinstance(arguments, Mapping) else {"arguments": arguments}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
