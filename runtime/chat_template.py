"""Renders chat templates as transformers does: Jinja in an immutable sandbox, with its filters, globals and tags.

A template comes with a bundle and is not trusted: it sees plain data only, and can't reach Python's objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from enginewright.plugins.errors import BundleError, RequestError

Message = Mapping[str, Any]
"""One turn: "role" and "content", and what else the template reads (tool calls, reasoning)."""


class ChatTemplate:
    """A compiled template. Raises BundleError if ``source`` is no valid template.

    ``special_tokens`` are variables of the template (bos_token, eos_token, ...).
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str | bool | None]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise BundleError(
                f"tokenizer/chat_template.jinja: line {e.lineno}: {e.message}", hint="Export the bundle again."
            ) from e
        self._variables = {k: v for k, v in special_tokens.items() if isinstance(v, str)}

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation.

        Args:
            messages: the turns.
            add_generation_prompt: end with the start of the assistant's turn.
            variables: what else the template reads, for example ``tools`` or ``enable_thinking``; plain data.

        Raises:
            RequestError: the template refuses the messages, or something is no plain data.
        """
        _check_messages(messages)
        try:
            data = json.loads(json.dumps({"messages": list(messages), **variables}))
        except (TypeError, ValueError) as e:
            raise RequestError(f"chat: not plain data: {e}", hint="Pass strings, numbers, lists and dicts.") from e
        try:
            return self._template.render(
                {"tools": None, "documents": None, **self._variables, **data},
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as e:
            raise RequestError(
                f"chat: the model's template refuses these messages: {e}",
                hint="Look at roles, their order, and each message's content.",
            ) from e


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's words for training; for rendering it is what stands in it."""

    tags = {"generation"}  # noqa: RUF012  the name that jinja2 reads

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise RequestError("chat: there are no messages", hint="Pass at least one message.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"chat: message {i} has no role",
                hint='Messages look like {"role": "user", "content": "Hello"}.',
            )


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
