"""The parts of a chat format: its reasoning, and the notation of its calls.

A notation is a class in a file of its own. It reads a call from an answer, and writes the grammar of one. Texts are as
a chat template writes them: the parser accepts other whitespace too, the grammar requires this one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .reader import AnswerReader, Steps
from .rules import RuleWriter

Tool = tuple[str, dict[str, Any], bool]
"""An offered tool: its name, the schema of its arguments, and ``strict``."""


@dataclass(frozen=True)
class Reasoning:
    """Reasoning between two markers.

    Attributes:
        begin, end: the markers.
        calls_end: True if a call's marker ends the reasoning too. Models of this format forget its end.
    """

    begin: str
    end: str
    calls_end: bool = False


@dataclass(frozen=True)
class Notation:
    """The notation of one call.

    A subclass overrides ``read`` and ``rule``; if ``whole_answer``, it overrides ``read_answer`` and ``answer_rule``
    instead.

    Attributes:
        whole_answer: True if the notation covers the whole answer, which then has no other markers.
        names: pattern of the tool names that can be written; None for any name.
    """

    whole_answer: ClassVar[bool] = False
    names: ClassVar[re.Pattern[str] | None] = re.compile(r"[^\s\"'<>={}()\[\]|｜:,\\\x00-\x1f]+")

    @property
    def lead(self) -> str:
        """The text between a call's marker and the tool's name, the same for all tools."""
        return ""

    @property
    def closing(self) -> str:
        """The text after a call's arguments. After a call that can't be read, the parser skips to it."""
        return ""

    def openers(self, calls: Calls) -> tuple[str, ...]:
        """Returns the texts with which a call may begin. ``calls``: the spelling around the calls."""
        return ((calls.section or calls.begin).split()[0],)

    def read(self, reader: AnswerReader, calls: Calls, opener: str, *, named: bool = False) -> Steps:
        """Reads one call. Returns True if it is whole, False if it is cut off or malformed, None if it isn't a call.

        Args:
            opener: the text already read, which becomes content if no call follows.
            named: True if the opener is the beginning of ``lead``, after a marker that the model forgot.
        """
        raise NotImplementedError

    def read_bare(self, reader: AnswerReader, calls: Calls) -> Steps:
        """Reads calls without markers. Returns False, and takes nothing, if there are none."""
        raise NotImplementedError

    def rule(self, writer: RuleWriter, index: int, name: str, schema: dict[str, Any]) -> str:
        """Returns the grammar rule of a call of the tool ``name``, from its name on.

        The rule begins with a quoted text.

        Args:
            writer: collects further rules.
            index: the tool's number, for the names of further rules.
            name: the tool's name.
            schema: the schema of the arguments.
        """
        raise NotImplementedError

    def call_schema(self, name: str, schema: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the JSON schema of a whole call where a call is a JSON value; None otherwise."""
        return None

    def read_answer(self, reader: AnswerReader) -> Steps:
        """Reads a whole answer into ``reader``, for a notation with ``whole_answer``."""
        raise NotImplementedError

    def answer_rule(
        self, writer: RuleWriter, tools: Sequence[Tool], schema: Mapping[str, Any] | None, *, required: bool
    ) -> str:
        """Returns the grammar rule of a whole answer.

        Args:
            writer: collects further rules.
            tools: the tools that may be called.
            schema: schema of an answer without calls; None for any text.
            required: True if the answer must be a call.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Calls:
    """The spelling of the calls in an answer.

    Attributes:
        call: the notation of one call.
        section, section_end: texts before and after all calls.
        begin, end: texts before and after each call.
        separator: text between two calls.
        text_after: True if the template writes an answer's text after its calls.
        bare: True if an answer may begin with a call that has no marker; then only offered tools can be called.
        marker: texts that may precede bare calls.
    """

    call: Notation
    section: str = ""
    begin: str = ""
    end: str = ""
    separator: str = ""
    section_end: str = ""
    text_after: bool = False
    bare: bool = False
    marker: tuple[str, ...] = ()

    @property
    def openers(self) -> tuple[str, ...]:
        """The texts with which a call may begin."""
        return self.marker if self.bare else self.call.openers(self)


@dataclass(frozen=True)
class Spelling:
    """A chat format.

    Attributes:
        name: the format's name, for people.
        calls: None if the model calls no tools.
        reasoning: None if the model shows none.
        signs: texts in a rendered conversation with a call, by which the format is recognized.
        words: texts in the template itself, if rendering isn't enough.
    """

    name: str
    calls: Calls | None = None
    reasoning: Reasoning | None = None
    signs: tuple[str, ...] = ()
    words: tuple[str, ...] = field(default=())
