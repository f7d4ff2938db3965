"""Texts for evaluation: the user's files, and the files that come with the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from enginewright.runtime.bundle.regular_file import MOST_TEXT_BYTES, read_regular
from enginewright.runtime.shared.errors import RequestError

BUILT_IN = "built-in"
"""The name, in place of a file, of the text or the questions that come with the package."""

EVALUATION_TEXT = "evaluation_text.txt"
"""The file of the text that comes with the package."""


def read_text(source: str | Path, option: str, built_in: str) -> str:
    """Returns the text of a file, or of the package's file ``built_in`` if ``source`` is BUILT_IN.

    A byte order mark is dropped; line ends stay as they are.

    Args:
        source: a path or BUILT_IN.
        option: the caller's option that set the source, for error messages: "text" or "choices".
        built_in: the name of a file in this package.

    Raises:
        RequestError: the file can't be read, is binary, isn't UTF-8 or is blank. The message names the position.
    """
    if source == BUILT_IN:
        data = resources.files(__package__).joinpath(built_in).read_bytes()
    else:
        try:
            data = read_regular(source, most=MOST_TEXT_BYTES, piped=True)
        except OSError as e:
            raise RequestError(
                f"{option}: {source} can't be read: {e.strerror}", hint="Pass a file of text in UTF-8."
            ) from e
    zero = data.find(b"\0")
    if zero >= 0:
        raise RequestError(
            f"{option}: {source} is binary: byte {zero} is zero", hint="Pass a file of text in UTF-8, as it is."
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise RequestError(
            f"{option}: {source} is not UTF-8 at byte {e.start}", hint="Convert the file to UTF-8."
        ) from e
    if not text.strip():
        raise RequestError(f"{option}: {source} is empty", hint="Pass a file with some text in it.")
    return text


@dataclass(frozen=True)
class SuitePrompt:
    """One prompt of a suite: a text to continue, or a conversation to answer. ``where`` is its file and line, for
    messages.
    """

    where: str
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()


def read_prompts(source: str | Path) -> list[SuitePrompt]:
    """Returns the prompts of a file, which is plain text or JSONL; it is JSONL if its first line begins with a brace.

    In plain text, each line is a prompt. In JSONL, each line is an object with either "prompt", a text, or "messages",
    a conversation. Empty lines are skipped.

    Args:
        source: a path, or BUILT_IN for the prompts that come with the package.

    Raises:
        RequestError: the file can't be read or is empty, or a line isn't such an object. The message names the line.
    """
    lines = read_text(source, "prompts", _PROMPTS).splitlines()
    numbered = [(f"{source}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered[0][1].lstrip().startswith("{"):
        return [SuitePrompt(where, text=line) for where, line in numbered]
    return [_of_line(where, line) for where, line in numbered]


_PROMPTS = "prompts.jsonl"
_SHAPE = 'A line is {"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]}.'


def _of_line(where: str, line: str) -> SuitePrompt:
    try:
        entry = json.loads(line)
    except ValueError as e:
        raise RequestError(f"prompts: {where}: not JSON: {e}", hint=_SHAPE) from e
    if not isinstance(entry, dict) or len(entry.keys() & {"prompt", "messages"}) != 1:
        raise RequestError(f"prompts: {where}: it needs one of prompt and messages", hint=_SHAPE)
    text, messages = entry.get("prompt"), entry.get("messages")
    if messages is None:
        if not isinstance(text, str) or not text:
            raise RequestError(f"prompts: {where}: prompt must be a text that isn't empty", hint=_SHAPE)
        return SuitePrompt(where, text=text)
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise RequestError(f"prompts: {where}: messages must be a list of objects", hint=_SHAPE)
    return SuitePrompt(where, messages=tuple(messages))
