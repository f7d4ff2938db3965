"""The parts of a model's answer: pieces while it is generated, and the whole message."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: of its ``reasoning``, of its ``content``, or of the call of index ``call``.

    Attributes:
        call: the index of the call; None for a piece of text.
        id: the call's id, if the format has ids; in the call's first piece.
        name: the tool's name; in the call's first piece, and in no other.
        arguments: a piece of the arguments, which together are JSON.
    """

    content: str = ""
    reasoning: str = ""
    call: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class ToolCall:
    """A tool call.

    Attributes:
        arguments: JSON text, an object if the call is complete.
        id: None in a format without ids.
        complete: False for a call that was cut off, or whose arguments aren't JSON.
    """

    name: str
    arguments: str
    id: str | None = None
    complete: bool = True


@dataclass(frozen=True)
class Message:
    """An answer in its parts.

    Attributes:
        content, reasoning: None if the answer has none.
        complete: False if the answer was cut off within its reasoning or within a call.
    """

    content: str | None = None
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    complete: bool = True
