"""Makes JSON schemas of Python functions for chat templates, equal to those of transformers' ``get_json_schema``.

The function's docstring is in Google's style: a description, then "Args:" with a line ``name: description`` for each
argument, which may end in ``(choices: [...])``, then perhaps "Returns:".
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from ..shared.errors import RequestError, shown

_SCALARS: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_CONTAINERS: dict[Any, str] = {list: "array", tuple: "array", dict: "object"}

_DESCRIPTION = re.compile(r"^(.*?)[\n\s]*(Args:|Returns:|Raises:|\Z)", re.DOTALL)
_ARGUMENTS = re.compile(r"\n\s*Args:\n(.*?)[\n\s]*(Returns:|Raises:|\Z)", re.DOTALL)
_RETURNS = re.compile(r"\n\s*Returns:\n\s*(.*?)[\n\s]*(Raises:|\Z)", re.DOTALL)
# "name: description" up to the next one that is not indented deeper.
_ARGUMENT = re.compile(r"(?:^|\n)([ \t]*)(\w+):\s*(.*?)\s*(?=\n(?!\1[ \t])[ \t]*\w+:|\Z)", re.DOTALL)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_schema(tool: Mapping[str, Any] | Callable[..., Any]) -> Mapping[str, Any]:
    """Returns ``tool`` if it is a schema already, else the schema of the function or method.

    Raises:
        RequestError: an argument has no type hint, a type that JSON lacks, or no description; the text names it.
    """
    if isinstance(tool, Mapping):
        return tool
    if not (inspect.isfunction(tool) or inspect.ismethod(tool)):
        raise RequestError(
            f"tools: {shown(tool)} is neither a JSON schema nor a function", hint="Pass dicts or functions."
        )
    name = tool.__name__
    document = (inspect.getdoc(tool) or "").strip()
    if not document:
        raise RequestError(f"tools: {name} has no docstring", hint="Say in it what the function does.")
    properties, required, result = _parameters(name, tool)
    described = _arguments(document)
    for argument, schema in properties.items():
        if argument not in described:
            raise RequestError(
                f"tools: {name}: the docstring says nothing about {argument!r}",
                hint="Describe each argument in a section Args: as `name: what it is`.",
            )
        schema |= _described(name, argument, described[argument])
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    description = _DESCRIPTION.search(document)
    function: dict[str, Any] = {"name": name, "description": description[1].strip() if description else None}
    function["parameters"] = parameters
    if result is not None:
        returns = _RETURNS.search(document)
        function["return"] = result | ({"description": returns[1].strip()} if returns else {})
    return {"type": "function", "function": function}


def _parameters(
    name: str, function: Callable[..., Any]
) -> tuple[dict[str, dict[str, Any]], list[str], dict[str, Any] | None]:
    """Returns the arguments' schemas by name, the arguments without a default, and the result's schema if it
    has one.
    """
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, SyntaxError) as e:
        raise RequestError(f"tools: {name}: its type hints can't be read: {e}") from e
    properties: dict[str, dict[str, Any]] = {}
    required: list[str] = []
    for i, (argument, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if argument not in hints:
            if i == 0 and argument in ("self", "cls"):
                continue
            raise RequestError(f"tools: {name}: argument {argument!r} has no type hint", hint="Add one.")
        properties[argument] = _type(f"tools: {name}: {argument}", hints[argument])
        if parameter.default is inspect.Parameter.empty:
            required.append(argument)
    try:
        result = _type(name, hints["return"]) if "return" in hints else None
    except RequestError:  # the model never writes the result, so a tool can do without its type
        result = None
    return properties, required, result


def _type(subject: str, hint: Any) -> dict[str, Any]:
    """Returns the schema of a type. Raises RequestError naming ``subject`` if JSON has no such type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is None:
        if hint is Any:
            return {}
        if hint in _SCALARS or hint in _CONTAINERS:
            return {"type": _SCALARS.get(hint) or _CONTAINERS[hint]}
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _values(subject, [member.value for member in hint])
    elif origin in (Union, types.UnionType):
        return _union(subject, args)
    elif origin is Literal:
        return _values(subject, list(args))
    elif origin is list:
        return {"type": "array", "items": _type(subject, args[0])}
    elif origin is tuple and len(args) != 1 and ... not in args:
        return {"type": "array", "prefixItems": [_type(subject, a) for a in args]} if args else {"type": "array"}
    elif origin is dict:
        return {"type": "object", "additionalProperties": _type(subject, args[1])}
    raise RequestError(
        f"{subject}: there is no JSON schema for the type {shown(hint)}",
        hint="Use str, int, float, bool, lists, dicts, enums, Literal and unions of them, or pass a schema.",
    )


def _union(subject: str, args: tuple[Any, ...]) -> dict[str, Any]:
    schemas = [_type(subject, a) for a in args if a is not type(None)]
    if len(schemas) == 1:
        result = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        names = sorted({schema["type"] for schema in schemas})
        result = {"type": names[0] if len(names) == 1 else names}
    else:
        result = {"anyOf": schemas}
    return result | ({"nullable": True} if type(None) in args else {})


def _values(subject: str, values: list[Any]) -> dict[str, Any]:
    """Returns the schema of an enumeration: one of ``values``."""
    if not values or any(type(v) not in _SCALARS for v in values):
        raise RequestError(f"{subject}: {shown(values)} are not all strings, numbers, booleans or None")
    names = list(dict.fromkeys(_SCALARS[type(v)] for v in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _arguments(document: str) -> dict[str, str]:
    """Returns the docstring's description of each argument, in one line."""
    section = _ARGUMENTS.search(document)
    if section is None:
        return {}
    text = "\n".join(line for line in section[1].split("\n") if line.strip())
    return {m[1]: re.sub(r"\s*\n+\s*", " ", m[2].strip()) for m in _ARGUMENT.findall(text)}


def _described(name: str, argument: str, text: str) -> dict[str, Any]:
    """Returns the description of an argument without the choices at its end, and the choices as "enum"."""
    choices = _CHOICES.search(text)
    if choices is None:
        return {"description": text}
    try:
        values = [v.strip() if isinstance(v, str) else v for v in json.loads(choices[1])]
    except (ValueError, TypeError) as e:
        raise RequestError(f"tools: {name}: the choices of {argument!r} aren't a JSON list: {e}") from e
    return {"enum": values, "description": text[: choices.start()].strip()}
