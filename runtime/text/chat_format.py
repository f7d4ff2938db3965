"""The format of a model's answers: the spelling of its tool calls and its reasoning.

parser = tokenizer.chat_format.parser(tokenizer, tools=tools, prompt_ids=prompt)
for ids in stream:
    for delta in parser.push(ids): ...
for delta in parser.finish(): ...
parser.message.calls
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..shared.errors import EnginewrightError
from .formats.answers import Delta, Message, ToolCall
from .formats.grammar import AnswerRules, begins_with_token, write_grammar
from .formats.markers import Vocabulary
from .formats.notation import Reasoning, Spelling
from .formats.parser import ChatParser
from .formats.response_template import of_response_template
from .formats.table import FORMATS, PLAIN, REASONING, THINK

__all__ = ["FORMATS", "ChatFormat", "ChatParser", "Delta", "Message", "Spelling", "ToolCall", "choose_format"]

_USER, _RESULT = "SeenByTheUser", "SeenByTheTool"
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Looks the weather up.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_ARGUMENTS = {"city": "Paris"}
_REASONINGS = (THINK, Reasoning("[THINK]", "[/THINK]"))


class Templates(Vocabulary, Protocol):
    """A ``Tokenizer`` with its chat templates."""

    chat_templates: dict[str, str]
    response_template: str | None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Returns the text of a conversation."""
        ...


@dataclass(frozen=True)
class ChatFormat:
    """A format of a model's answers, returned by ``Tokenizer.chat_format``.

    Attributes:
        spelling: the format's entry of ``formats.table.FORMATS``.
    """

    spelling: Spelling

    @property
    def name(self) -> str:
        """The format's name, such as "hermes"; "plain" of a model without calls and reasoning."""
        return self.spelling.name

    @property
    def has_calls(self) -> bool:
        """True if tool calls can be distinguished from text."""
        return self.spelling.calls is not None

    @property
    def has_reasoning(self) -> bool:
        """True if reasoning can be distinguished from the answer."""
        return self.spelling.reasoning is not None or self._has_channels

    @property
    def _has_channels(self) -> bool:
        return self.spelling.calls is not None and self.spelling.calls.call.whole_answer

    def parser(
        self,
        tokenizer: Vocabulary,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt_ids: Sequence[int] = (),
        reasoning_open: bool | None = None,
    ) -> ChatParser:
        """Returns a parser of one answer.

        Args:
            tokenizer: the model's tokenizer.
            tools: JSON schemas of the offered tools; None if the tools aren't known.
            prompt_ids: the prompt's tokens; they show whether the answer begins within the reasoning.
            reasoning_open: True if the answer begins within the reasoning; None reads ``prompt_ids``.
        """
        if reasoning_open is None:
            reasoning_open = self.reasoning_open(tokenizer, prompt_ids)
        return ChatParser(self.spelling, tokenizer, tools=tools, reasoning_open=reasoning_open)

    def parse(
        self,
        tokenizer: Vocabulary,
        ids: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt_ids: Sequence[int] = (),
        reasoning_open: bool | None = None,
    ) -> Message:
        """Returns the content, reasoning and tool calls of a whole answer. The parameters are those of ``parser``."""
        parser = self.parser(tokenizer, tools=tools, prompt_ids=prompt_ids, reasoning_open=reasoning_open)
        parser.push(ids)
        parser.finish()
        return parser.message

    def grammar(
        self,
        tokenizer: Vocabulary,
        tools: Sequence[Mapping[str, Any]] | None,
        rules: AnswerRules = AnswerRules(),
        *,
        prompt_ids: Sequence[int] = (),
        reasoning_open: bool | None = None,
        ignored: set[str] | None = None,
    ) -> str | None:
        """Returns an answer's grammar for ``StructuredOutputsParams(grammar=...)``; None if no rule limits the answer.

        If the format has reasoning, the grammar limits only the text after it.

        Args:
            tokenizer: the model's tokenizer.
            tools: JSON schemas of the offered tools.
            rules: the limits of the answer.
            prompt_ids, reasoning_open: as for ``parser``.
            ignored: a set to which the names of schema constraints that can't be enforced are added, such as
                "tools.uniqueItems" or "schema.not".

        Raises:
            RequestError: two tools have one name, the format can't write a tool's name, no answer can meet a schema,
                there are more than 1,024 tools, the model's format has no calls, or there is a reasoning budget and the
                end of the model's reasoning isn't a token.
        """
        if reasoning_open is None:
            reasoning_open = self.reasoning_open(tokenizer, prompt_ids)
        return write_grammar(
            self.spelling,
            tokenizer,
            tools,
            rules,
            reasoning_open=reasoning_open,
            ignored=ignored,
        )

    def limits_reasoning(self, tokenizer: Vocabulary) -> bool:
        """Returns True if a grammar can limit the tokens of the reasoning: its markers begin with special tokens."""
        reasoning = self.spelling.reasoning
        if reasoning is None or self._has_channels:
            return False
        return all(begins_with_token(mark.strip(), tokenizer) for mark in (reasoning.begin, reasoning.end))

    def reasoning_open(self, tokenizer: Vocabulary, prompt_ids: Sequence[int]) -> bool:
        """Returns True if a prompt ends within the reasoning, which the template has begun."""
        reasoning = self.spelling.reasoning
        if reasoning is None or not prompt_ids:
            return False
        begin, end = reasoning.begin.strip(), reasoning.end.strip()
        added = tokenizer.added_tokens
        if begin in added and end in added:
            for token in reversed(prompt_ids):
                if token in (added[begin], added[end]):
                    return token == added[begin]
            return False
        tail = b"".join(tokenizer.token_bytes(token) for token in prompt_ids[-len(begin) - 8 :])
        return tail.decode(errors="replace").rstrip().endswith(begin)


def choose_format(tokenizer: Templates, chat_template: str | None = None) -> ChatFormat:
    """Returns the format of a model's answers: the one with the markers that the chat template writes around a call.

    The template renders a conversation with a tool, a call and its result. If the format of calls is unknown, only
    markers of reasoning are searched for; if there are none, answers are plain text. A ``response_template`` of the
    model is used instead, if it can be converted.
    """
    source = tokenizer.chat_templates.get("tool_use") or tokenizer.chat_templates.get("default")
    if chat_template is not None:
        source = tokenizer.chat_templates.get(chat_template, chat_template)
    if source is None:
        return ChatFormat(PLAIN)
    spelling = next((one for one in FORMATS if one.words and all(word in source for word in one.words)), None)
    if spelling is None:
        text = _rendered_call(tokenizer, chat_template)
        spelling = next((one for one in FORMATS if text and all(sign in text for sign in one.signs)), None)
    reasoning = _known_reasoning(spelling, source + "\0".join(tokenizer.added_tokens))
    if spelling is None:
        chosen = PLAIN if reasoning is None else replace(REASONING, reasoning=reasoning)
    else:
        chosen = spelling if spelling.reasoning is None else replace(spelling, reasoning=reasoning)
    if tokenizer.response_template is not None and chat_template is None:
        chosen = of_response_template(tokenizer.response_template, chosen) or chosen
    return ChatFormat(chosen)


def _known_reasoning(found: Spelling | None, known: str) -> Reasoning | None:
    """Returns the first markers of reasoning whose end occurs in the text ``known``; None if there are none.

    ``found``: the format of calls, whose own markers are tried first; None if it is unknown.
    """
    candidates = [one for one in (None if found is None else found.reasoning, *_REASONINGS) if one is not None]
    return next((one for one in candidates if one.end.strip() in known), None)


def _rendered_call(tokenizer: Templates, chat_template: str | None) -> str:
    """Returns an assistant's turn with a call, as the template renders it; "" if the template refuses calls."""
    for content in ("", None):
        for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
            call = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": _USER},
                {"role": "assistant", "content": content, "tool_calls": [call]},
                {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": _RESULT},
            ]
            try:
                text = tokenizer.render_chat(messages, tools=[_TOOL], chat_template=chat_template)
            except EnginewrightError:
                continue
            text = text[text.rfind(_USER) + len(_USER) :] if _USER in text else text
            text = text[: text.find(_RESULT)] if _RESULT in text else text
            if "get_weather" in text:
                return text
    return ""
