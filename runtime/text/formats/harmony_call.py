"""OpenAI's Harmony: an answer is messages of channels, and a call is a message with a recipient.

https://github.com/openai/harmony
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .notation import Notation, Tool
from .reader import AnswerReader, Steps, Stops, ignore
from .rules import ANY, RuleWriter, json_rule, quoted


@dataclass(frozen=True)
class HarmonyCall(Notation):
    """Calls of the format Harmony: a call is a message with a recipient, ``functions.f``.

    Reasoning and answer are messages of other channels.

    Attributes:
        start, channel, constrain, message, end, call, stop: the spelling of the control tokens.
        prefix: the text before a tool's name in a recipient.
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    end: str = "<|end|>"
    call: str = "<|call|>"
    stop: str = "<|return|>"
    prefix: str = "functions."

    whole_answer: ClassVar[bool] = True

    def answer_rule(
        self, writer: RuleWriter, tools: Sequence[Tool], schema: Mapping[str, Any] | None, *, required: bool
    ) -> str:
        """Returns the grammar rule of a whole answer. The arguments are those of `Notation.answer_rule`."""
        token = {
            part: writer.as_written(getattr(self, part)) for part in ("start", "channel", "constrain", "message", "end")
        }
        writer.add("free", ANY)
        ahead = f'{token["end"]} {token["start"]} "assistant"'
        analysis = f'{token["channel"]} "analysis" {token["message"]} free {ahead}'
        preamble = f'{token["channel"]} "commentary" {token["message"]} free {ahead}'
        ends = []
        kind = f'( " "? {token["constrain"]} "json" | " json" )?'
        after_channel, before_channel = [], []
        for i, (name, parameters, _) in enumerate(tools):
            arguments = writer.add(f"tool_{i}", f"{kind} {token['message']} %json {json_rule(parameters)}")
            after_channel.append(f"{quoted(name)} {arguments}")
            before_channel.append(f'{quoted(name)} {token["channel"]} "commentary" {arguments}')
        if tools:
            to = f" to={self.prefix}"
            ends.append(f"{token['channel']} {quoted('commentary' + to)} {writer.one_of(after_channel)}")
            ends.append(f"{quoted(to)} {writer.one_of(before_channel)}")
        if not required:
            answer = "free" if schema is None else f"%json {json_rule(schema)}"
            ends.append(f'{token["channel"]} "final" ( " "? {token["constrain"]} "json" )? {token["message"]} {answer}')
        before = f"( {analysis} )*" if schema is not None and not tools else f"( {analysis} | {preamble} )*"
        return f"{before} ( {' | '.join(ends)} )"

    def read_answer(self, reader: AnswerReader) -> Steps:
        """Reads a whole answer into ``reader``: its reasoning, content and calls."""
        ends = [self.end, self.call, self.stop, self.start]
        header_stops = Stops([self.message, *ends])
        reader.in_reasoning = False
        yield from reader.skip_space()
        if (yield from reader.peek((self.channel, "to=", self.start))) is None and not reader.at_end:
            stop = yield from reader.read_until(Stops([self.start, self.end, self.stop]), reader.add_content)
            if stop is None:
                return
        while True:
            header: list[str] = []
            stop = yield from reader.read_until(header_stops, header.append)
            text = "".join(header)
            if stop is None:
                reader.cut = reader.cut or bool(text.strip())
                return
            if stop != self.message:
                continue
            emit = yield from self._begin_message(reader, text)
            if emit is None:
                return
            stop = yield from reader.read_until(Stops(ends), emit)
            if stop is None:
                reader.add_last_space()
                return
            reader.in_reasoning = False
            reader.held_space = ""

    def _begin_message(self, reader: AnswerReader, header: str) -> Steps:
        """Begins the message that follows a header.

        Returns the function that takes the message's text; None at the end.

        A call is read here, up to the end of its arguments. Text after them is ignored.
        """
        _, _, rest = header.partition(self.channel)
        recipient = next(iter(re.findall(r"\bto=([^\s\udc00-\udfff]+)", header)), "")
        channel = (re.findall(r"\s*(\w*)", rest) or [""])[0]
        emit: Callable[[str], None] = ignore
        if recipient.startswith(self.prefix):
            reader.begin_call(recipient.removeprefix(self.prefix))
            yield from reader.skip_space()
            if (yield from reader.peek(("{",))) is not None and (yield from reader.read_json(reader.add_arguments)):
                reader.end_call()
            if reader.at_end:
                return None
        elif recipient and recipient != "assistant":
            return ignore
        elif channel == "analysis":
            reader.begin_text("reasoning")
            reader.in_reasoning = True
            emit = reader.add_reasoning
        elif channel in ("final", "commentary"):
            reader.begin_text("content")
            emit = reader.add_content
        return emit
