"""Parses an answer's token ids incrementally into content, reasoning and tool calls: see ``ChatParser``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .answers import Delta, Message
from .markers import MARKERS, Vocabulary, coded_format
from .notation import Calls, Reasoning, Spelling
from .reader import AnswerReader, Steps, Stops, ignore


class ChatParser:
    """Parses one answer.

    ``push`` takes any number of token ids and returns the pieces that are certain by then; ``finish`` returns the rest.
    The pieces together are ``message``, however the tokens are divided.

    A text that begins like a call but has no readable name is content. Space around reasoning and before a call isn't
    part of any text.

    Args:
        spelling: the format.
        tokenizer: the model's tokenizer.
        tools: JSON schemas of the offered tools. Parameters between tags get their types from these, and a format
            without markers can call only these.
        reasoning_open: True if the prompt ends within the reasoning.
    """

    def __init__(
        self,
        spelling: Spelling,
        tokenizer: Vocabulary,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_open: bool = False,
    ) -> None:
        coded = coded_format(spelling, tokenizer)
        self._format = coded.spelling
        self._reader = AnswerReader(coded, tools, reasoning_open)
        calls = self._format.calls
        whole = calls is not None and calls.call.whole_answer
        self._steps = calls.call.read_answer(self._reader) if whole and calls is not None else self._answer()
        self._over = False
        self._advance()

    @property
    def in_reasoning(self) -> bool:
        """True while the answer is within its reasoning."""
        return self._reader.in_reasoning

    def push(self, token_ids: Sequence[int]) -> list[Delta]:
        """Returns the pieces that these tokens complete."""
        self._reader.push(token_ids)
        self._advance()
        return self._reader.take_deltas()

    def finish(self) -> list[Delta]:
        """Ends the answer after its last token. Returns the pieces of text that were held back until now."""
        if not self._reader.ended:
            self._reader.end()
            self._advance()
        return self._reader.take_deltas()

    @property
    def message(self) -> Message:
        """The answer so far, in its parts."""
        return self._reader.message

    def _advance(self) -> None:
        if not self._over:
            try:
                next(self._steps)
            except StopIteration:
                self._over = True
        self._reader.drop_read()

    # ---- answers

    def _answer(self) -> Steps:
        reader, reasoning, calls = self._reader, self._format.reasoning, self._format.calls
        begin = reasoning.begin.strip() if reasoning else ""
        end = reasoning.end.strip() if reasoning else ""
        openers = calls.openers if calls is not None else ()
        if reasoning is not None:
            yield from self._first_reasoning(reasoning, begin, openers)
        if calls is not None and calls.bare:
            yield from reader.hold_space()
            if (yield from self._bare(calls)):
                reader.held_space = ""
        again = [one for one in (begin, end) if len(one) == 1 and MARKERS.match(one)]
        stops = Stops([*openers, *again])
        while (stop := (yield from reader.read_until(stops, reader.add_content))) is not None:
            if stop in openers and calls is not None:
                yield from self._called(calls, stop)
            elif stop == begin and reasoning is not None:
                yield from self._reason(reasoning, openers)
            elif stop == end:
                reader.trim = not reader.content
        reader.add_last_space()

    def _first_reasoning(self, reasoning: Reasoning, begin: str, openers: tuple[str, ...]) -> Steps:
        """Reads the reasoning, if the answer begins with it, and calls that end the reasoning."""
        reader, calls = self._reader, self._format.calls
        if not reader.in_reasoning:
            if not begin:
                return
            yield from reader.hold_space()
            if (yield from reader.take(begin)) is None:
                if reader.ended and MARKERS.match(begin) and begin.startswith(reader.text[reader.at :] or " "):
                    reader.at = len(reader.text)
                    reader.in_reasoning = True  # it broke off within the reasoning's beginning
                return
            reader.held_space = ""
        if (yield from self._reason(reasoning, openers)) and calls is not None:
            yield from self._called(calls, "")

    def _reason(self, reasoning: Reasoning, openers: tuple[str, ...]) -> Steps:
        """Reads the reasoning up to its end. Returns True if a call ended it."""
        reader = self._reader
        reader.in_reasoning = True
        reader.begin_text("reasoning")
        calls = openers[:1] if reasoning.calls_end and len(openers[0]) == 1 else ()
        stop = yield from reader.read_until(Stops([reasoning.end.strip(), *calls]), reader.add_reasoning)
        reader.held_space = ""
        if stop is None:
            return False
        reader.in_reasoning = False
        reader.trim = True
        return stop in calls

    # ---- calls

    def _called(self, calls: Calls, opener: str) -> Steps:
        """Reads the calls that begin with ``opener``, which was read. Text that isn't a call becomes content."""
        first = (calls.section or calls.begin).split()
        if calls.bare:
            yield from self._bare(calls)
            return
        named = bool(opener) and [opener] != first[:1]  # models forget the marker before the name
        if not named:
            rest = " ".join(first[1:])
            if rest and not (yield from self._reader.take_words(rest)):
                self._reader.reject_call(opener, expected=rest)
                return
        if calls.section:
            yield from self._section(calls)
        else:
            yield from self._one(calls, opener, named=named)

    def _bare(self, calls: Calls) -> Steps:
        """Reads calls without a marker, or after one of ``calls.marker``. Returns False if there are none."""
        if calls.marker and (yield from self._reader.take(*calls.marker)) is not None:
            yield from self._reader.skip_space()
        return (yield from calls.call.read_bare(self._reader, calls))

    def _section(self, calls: Calls) -> Steps:
        reader, number = self._reader, 0
        while True:
            yield from reader.skip_space()
            if reader.at_end:
                reader.cut = True
                return
            if calls.section_end and (yield from reader.take_words(calls.section_end)):
                return
            if number and calls.separator.strip():
                yield from reader.take_words(calls.separator)
            if calls.begin and not (yield from reader.take_words(calls.begin)):
                if reader.broke_off(calls.begin) or reader.broke_off(calls.section_end):
                    return
                stop = yield from reader.read_until(Stops([calls.begin, calls.section_end]), ignore)
                if stop != calls.begin:
                    reader.cut = reader.cut or reader.ended
                    return
            if not (yield from self._one(calls, calls.begin)) and not calls.begin:
                return
            number += 1

    def _one(self, calls: Calls, opener: str, *, named: bool = False) -> Steps:
        """Reads one call up to its end. Returns True if it is a call. The arguments are those of ``Notation.read``."""
        reader = self._reader
        whole = yield from calls.call.read(reader, calls, opener, named=named)
        if whole is None:
            return False
        if whole:
            reader.end_call()
        end = calls.end.strip()
        if whole and (not end or (yield from reader.take_words(end)) or not reader.at_end):
            return True
        if not whole:
            closing = [end, calls.section_end.strip()] if end else [calls.call.closing.strip()]
            yield from reader.read_until(Stops(closing), ignore)
        return whole
