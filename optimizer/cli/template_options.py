"""Options that become variables of the chat template: ``--system``, ``--tools`` and ``--set``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.json_document import parse_json

from .options import named_value

_TAKEN = ("messages", "params", "self")  # arguments of LLM.chat


@dataclass(frozen=True)
class Template:
    """The options of a chat: a system message, tools, and variables of the chat template."""

    system: Annotated[str | None, typer.Option(help="A system message before the first prompt.")] = None
    tools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file with a list of functions that the model may call.")
    ] = None
    variables: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A variable of the chat template; may be repeated."),
    ] = None

    def given(self) -> dict[str, Any]:
        """Returns keyword arguments for ``LLM.chat`` from ``--tools`` and ``--set``.

        A variable's value is parsed if it is JSON (true, 3, [1, 2]); otherwise it is text.

        Raises:
            RequestError: the file of tools can't be read, or isn't a list of objects; the message names the file.
            typer.BadParameter: ``--set`` isn't of the form NAME=VALUE, or its name is an argument of ``LLM.chat``.
        """
        options: dict[str, Any] = {}
        for text in self.variables or []:
            name, value = named_value("--set", text, "enable_thinking=false")
            if name in _TAKEN:
                raise typer.BadParameter(
                    f"--set {text}: {name!r} can't be set, only variables that the template reads besides"
                )
            options[name] = value
        if self.tools is not None:
            options["tools"] = _read_tools(self.tools)
        return options


def _read_tools(path: Path) -> list[dict[str, Any]]:
    try:
        value = parse_json(read_regular(path, most=MOST_JSON_BYTES, piped=True))
    except OSError as e:
        raise RequestError(f"--tools {path}: can't be read: {e.strerror or e}", hint="Pass a JSON file.") from e
    except ValueError as e:
        raise RequestError(f"--tools {path}: can't be read as JSON: {e}", hint="Pass a JSON file.") from e
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RequestError(
            f"--tools {path}: must be a list of JSON objects",
            hint='Such as [{"type": "function", "function": {"name": "f", "description": "...", "parameters": {}}}].',
        )
    return value
