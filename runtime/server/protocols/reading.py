"""Splits answers into reasoning, content and calls, according to the format of the model's chat template."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import msgspec

from ...requests.sampling import SamplingParams
from ...shared.errors import RequestError
from ...tasks.generate import Finished
from ...text.chat_format import ChatFormat, ChatParser, Delta
from ...text.formats.grammar import AnswerRules
from ...text.output_text import OutputText
from ...text.tokenizer import Tokenizer
from ..engines.records import Piece
from .answers import News
from .tools import ToolChoice, custom_input


def _schema_of(form: Mapping[str, Any]) -> Any:
    """Returns the JSON schema of a form; None if it is a pattern, a choice or a grammar. Raises RequestError."""
    schema = {"type": "object"} if form.get("json_object") else form.get("json")
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema)
    except msgspec.DecodeError as e:
        raise RequestError(f"structured_outputs: json isn't JSON: {e}", hint="Pass a schema.") from e


class Reading:
    """Reads the answers of one conversation, and makes the grammar that limits them.

    Args:
        tokenizer: None if the bundle has none. Then answers are the engine's text, as with a model whose template has
            neither calls nor reasoning.
        tools: the tools that may be called.
        prompt: the prompt's token ids.
        raw: True if the text shall contain special tokens.
        reasons: True if the model may reason; False: the grammar applies from the first token.

    Attributes:
        ignored: constraints of schemas that can't be enforced, once ``form`` has been called.

    Raises RequestError if there are tools, but the model's format of calls isn't known.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        tools: ToolChoice,
        prompt: Sequence[int],
        *,
        raw: bool = False,
        reasons: bool = True,
    ) -> None:
        self._tokenizer, self._tools, self._prompt, self._reasons = tokenizer, tools, prompt, reasons
        self._format: ChatFormat | None = None
        self.ignored: set[str] = set()
        if tokenizer is None:
            return
        chat_format, offered = tokenizer.chat_format, tools.shown is not None
        if offered and not chat_format.has_calls:
            hint = "Leave them out, or describe them in a message."
            raise RequestError("tools: it isn't known how this model writes calls", hint=hint)
        if not offered and chat_format.name != "harmony":  # calls that nobody offered are text
            chat_format = ChatFormat(replace(chat_format.spelling, calls=None))
        if offered or (chat_format.has_reasoning and not raw):
            self._format = chat_format

    @property
    def limits_reasoning(self) -> bool:
        """Returns True if the tokens of the reasoning can be limited; False also where there is no reasoning."""
        return (
            self._format is not None and self._tokenizer is not None and self._format.limits_reasoning(self._tokenizer)
        )

    @property
    def reasons(self) -> bool:
        """True if answers may have reasoning in markers, separate from their content."""
        return self._format is not None and self._format.has_reasoning

    @cached_property
    def _open(self) -> bool:
        """Returns True if the prompt ends within the reasoning."""
        assert self._format is not None and self._tokenizer is not None
        return self._format.reasoning_open(self._tokenizer, self._prompt)

    def form(self, wanted: Mapping[str, Any] | None, budget: int | None = None) -> Mapping[str, Any] | None:
        """Returns the form of the whole answer, as fields of StructuredOutputsParams; None if any text will do.

        Args:
            wanted: the form of its content; None for any.
            budget: the most tokens of its reasoning; None for no limit. It is ignored where there is no reasoning.

        Raises RequestError for forms that exclude each other.
        """
        tools, held = self._tools, self._format
        if held is None or self._tokenizer is None:
            return wanted
        if not self._reasons and not self._open and held.name != "harmony":
            held = ChatFormat(replace(held.spelling, reasoning=None))
        if tools.shown is None and not held.has_reasoning:
            return wanted
        schema = None if wanted is None else _schema_of(wanted)
        if wanted is not None and schema is None:
            self._check_alone(wanted)
            return wanted
        budget = budget if held.has_reasoning else None
        if schema is None and budget is None and not tools.restricted:
            return None
        choice = tools.name or (tools.mode if tools.shown else "none")
        rules = AnswerRules(choice, parallel=tools.parallel, schema=schema, reasoning_budget=budget)
        offered = tools.tools if tools.shown else None
        grammar = held.grammar(self._tokenizer, offered, rules, reasoning_open=self._open, ignored=self.ignored)
        return wanted if grammar is None else {"grammar": grammar}

    def _check_alone(self, wanted: Mapping[str, Any]) -> None:
        """Raises RequestError if the form isn't JSON and the answer may also have calls or reasoning."""
        kind = next((name for name, value in wanted.items() if value), "structured_outputs")
        if self._tools.shown is not None:
            hint = "Ask for JSON, or leave tools out."
            raise RequestError(f"tools: with {kind} an answer has no room for calls", hint=hint)
        if self._open:
            hint = 'Turn the reasoning off, as with "reasoning_effort": "none", or ask for JSON.'
            raise RequestError(f"structured_outputs: {kind} of an answer that begins with reasoning", hint=hint)

    def reader(self, params: SamplingParams, prefix: str) -> Reader:
        """Returns a reader of one answer. ``prefix``: prefix of the ids of calls."""
        if self._format is None or self._tokenizer is None:
            return Reader()
        parser = self._format.parser(self._tokenizer, tools=self._tools.shown or (), reasoning_open=self._open)
        nine = self._format.name.startswith("mistral")  # its template takes no other ids
        return Reader(parser, params, self._tools.custom, "" if nine else prefix)


class Reader:
    """Reads one answer: as the engine's text, or by a parser.

    A parser gets tokens, which may contain a stop string. So this class cuts content and reasoning at stop strings,
    as the engine cuts its text.

    Args:
        parser: None for the engine's text.
        params: the request's sampling parameters.
        custom: names of tools with text input: the pieces of their calls are sent together.
        prefix: prefix of the ids of calls; empty for ids of nine letters.

    Attributes:
        reasoning_tokens: number of tokens that were reasoning.
    """

    def __init__(
        self,
        parser: ChatParser | None = None,
        params: SamplingParams | None = None,
        custom: frozenset[str] = frozenset(),
        prefix: str = "",
    ) -> None:
        self._parser, self._custom, self._prefix = parser, custom, prefix
        self._cuts: dict[str, OutputText] = {}
        if parser is not None and params is not None and params.stop:
            keep = params.include_stop_str_in_output
            self._cuts = {kind: OutputText(_AsItIs(), params.stop, keep_stop=keep) for kind in ("content", "reasoning")}
        self._waiting: tuple[Delta, list[str]] | None = None  # a custom tool's call
        self.reasoning_tokens = 0

    def push(self, piece: Piece) -> News:
        """Returns the new deltas of an answer after its next piece."""
        parser, finish = self._parser, piece.finish_reason
        if parser is None:
            return News([Delta(content=piece.text)] if piece.text else [], piece, finish)
        deltas = []
        for token in piece.token_ids:
            self.reasoning_tokens += parser.in_reasoning
            deltas += parser.push((token,))
        if finish is not None:
            deltas += parser.finish()
            if finish == "stop" and parser.message.calls:
                finish = "tool_calls"
        return News(self._shaped(deltas, piece.finish_reason is not None), piece, finish)

    def read(self, one: Finished) -> News:
        """Returns the deltas and the finish reason of a whole answer. ``one``: the answer as the engine returned it."""
        return self.push(Piece(0, 0, tuple(one.token_ids), one.text, one.finish_reason, one.logprobs))

    @property
    def parses(self) -> bool:
        """Returns True if the answer is parsed from its tokens, False if it is the engine's text."""
        return self._parser is not None

    @property
    def turn(self) -> dict[str, Any] | None:
        """Returns the answer as a message that a client would send back; None if the answer is the engine's text."""
        if self._parser is None:
            return None
        message = self._parser.message
        turn: dict[str, Any] = {"role": "assistant", "content": message.content or ""}
        if message.reasoning:
            turn["reasoning_content"] = message.reasoning
        if message.calls:
            turn["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                | ({} if call.id is None else {"id": call.id})
                for call in message.calls
            ]
        return turn if message.complete else None

    def _shaped(self, deltas: Sequence[Delta], last: bool) -> list[Delta]:
        """Returns the deltas with texts cut at stop strings, ids added to calls, and custom tools' calls joined."""
        shaped: list[Delta] = []
        for delta in deltas:
            if delta.call is None:
                shaped += self._sent()
                shaped += self._cut(delta)
            elif delta.name is not None:
                shaped += self._sent()
                call = replace(delta, id=delta.id or self._new_id())
                if delta.name in self._custom:
                    self._waiting = call, [delta.arguments]
                else:
                    shaped.append(call)
            elif self._waiting is not None:
                self._waiting[1].append(delta.arguments)
            else:
                shaped.append(delta)
        if last:
            shaped += self._sent()
            for kind, cut in self._cuts.items():
                cut.finish()
                shaped += _said(kind, cut.take())
        return shaped

    def _cut(self, delta: Delta) -> list[Delta]:
        if not self._cuts:
            return [delta]
        if any(cut.stopped_by is not None for cut in self._cuts.values()):
            return []
        kind = "content" if delta.content else "reasoning"
        cut = self._cuts[kind]
        cut.push(delta.content or delta.reasoning)
        return _said(kind, cut.take())

    def _sent(self) -> list[Delta]:
        if self._waiting is None:
            return []
        (delta, texts), self._waiting = self._waiting, None
        return [replace(delta, arguments=custom_input("".join(texts)))]

    def _new_id(self) -> str:
        return self._prefix + secrets.token_hex(12) if self._prefix else secrets.token_hex(5)[:9]


def _said(kind: str, text: str) -> list[Delta]:
    if not text:
        return []
    return [Delta(content=text) if kind == "content" else Delta(reasoning=text)]


class _AsItIs:
    """Stands in for a detokenizer if the pieces are text already."""

    def push(self, token: str) -> str:
        return token

    def flush(self) -> str:
        return ""
