"""Handles content that models can't read: images, audio, files, and parts of unknown types.

Agents repeat such content in their history for the rest of a session. In earlier messages and in tool results a note
replaces it, and a header of the answer lists it. In the user's last message it is refused, because the answer would
ignore part of the question.

Each protocol decides which message is the user's last one. Tool results, and messages of only tool results, never are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...shared.errors import RequestError, meant, shown

_KINDS = {
    **dict.fromkeys(("image", "image_url", "input_image", "images"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file", "document", "container_upload"), "file"),
}
"""Type of a part -> its name in a note. Other parts have the name of their type."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_MOST_NAME = 64
_TEXTS = ("text", "input_text", "output_text")
_FIELDS = ("audio", "images")
"""Fields of a message, besides ``content``, that may have content."""


class Unsupported:
    """The unsupported content of one body.

    Attributes:
        replaced: the place and the type of each part that a note replaces, in order.
    """

    def __init__(self) -> None:
        self.replaced: list[str] = []

    def note(self, place: str, kind: str, refused: bool = False) -> str:
        """Returns the note that replaces a part, and records the part in ``replaced``.

        Args:
            place: the part's place in the body, such as ``messages[2].content[1]``.
            kind: the part's type.
            refused: True in the user's last message, where the part is an error instead.

        Raises RequestError naming the part if ``refused``.
        """
        if refused:
            hint = (
                meant(kind, ["text"])
                + "Describe it in words. In earlier messages and in tool results, a note replaces it."
            )
            raise RequestError(f"{place}: {shown(kind)}: models take text alone here", hint=hint)
        name = _UNSAFE.sub("_", kind[:_MOST_NAME])
        self.replaced.append(f"{place} ({name})")
        return f"[{_KINDS.get(kind, name)} omitted: this model reads text only]"


def type_of(part: Any) -> str | None:
    """Returns the type of a part; None if the part isn't an object with a type."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else None


def text_only(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns messages of chat completions without their unsupported content, and the types of the replaced content.

    The user's last message is the last one with the role "user". Malformed parts, without a type, stay unchanged.

    Raises RequestError for unsupported content in the user's last message.
    """
    unsupported = Unsupported()
    last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    texts = [_text_message(f"messages[{i}]", one, unsupported, i == last) for i, one in enumerate(messages)]
    return texts, unsupported.replaced


def _text_message(place: str, message: Mapping[str, Any], unsupported: Unsupported, refused: bool) -> dict[str, Any]:
    text = {name: value for name, value in message.items() if name not in _FIELDS}
    content = message.get("content")
    if isinstance(content, list):
        content = [_text_part(f"{place}.content[{j}]", part, unsupported, refused) for j, part in enumerate(content)]
        text["content"] = content
    notes = [unsupported.note(spot, name, refused) for spot, name in _further_parts(place, message)]
    if notes and isinstance(content, list):
        text["content"] = [*content, *({"type": "text", "text": note} for note in notes)]
    elif notes:
        text["content"] = "\n".join([content, *notes] if isinstance(content, str) and content else notes)
    return text


def _further_parts(place: str, message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (place, type) of each part of a message that isn't in its ``content``."""
    for name in _FIELDS:
        value = message.get(name)
        if isinstance(value, list):
            yield from ((f"{place}.{name}[{j}]", name) for j in range(len(value)))
        elif value:
            yield f"{place}.{name}", name


def _text_part(place: str, part: Any, unsupported: Unsupported, refused: bool) -> Any:
    kind = type_of(part)
    if kind is None or kind in _TEXTS:
        return part
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    return {"type": "text", "text": unsupported.note(place, kind, refused)}
