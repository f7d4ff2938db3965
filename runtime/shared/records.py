"""Records for a bundle's JSON: frozen and typed; an unknown or wrong field raises an error that names it.

They are msgspec's structs, which check a program of thousands of operands in a few milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Self, TypeVar

import msgspec
from msgspec import Meta

from .errors import BundleError
from .json_document import parse_shown

Positive = Annotated[int, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]

_PLACE = re.compile(r" - at (`key` in )?`\$(.*)`$", re.DOTALL)
_PARTS = re.compile(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])")
_NAMED = re.compile(r"^Object (?:missing required|contains unknown) field `(.*)`$", re.DOTALL)


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen record. Types are checked by ``read`` and ``model_validate``, not by the constructor.

    Fields of types that JSON doesn't have define ``of_json`` and ``to_json``. Method names are those of pydantic, which
    recipes use.
    """

    @classmethod
    def model_validate(cls, data: object) -> Self:
        """Makes a record from JSON values. Raises msgspec.ValidationError, which is a ValueError."""
        return msgspec.convert(data, cls, dec_hook=_of_json)

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        """Returns a copy with other values of some fields."""
        return msgspec.structs.replace(self, **update)

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: Collection[str] | None = None,
        exclude: Collection[str] = (),
        exclude_none: bool = False,
        exclude_defaults: bool = False,
    ) -> dict[str, Any]:
        """Returns the fields as a dict, with nested records as dicts; in mode "json" only types of JSON."""
        kind = self.__struct_config__
        values: dict[str, Any] = {kind.tag_field: kind.tag} if kind.tag_field else {}
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if field.name in exclude or (include is not None and field.name not in include):
                continue
            if (exclude_none and value is None) or (exclude_defaults and value == _default(field)):
                continue
            options = {"mode": mode, "exclude_none": exclude_none, "exclude_defaults": exclude_defaults}
            values[field.name] = _plain(value, options)
        return values


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _plain(value: Any, options: dict[str, Any]) -> Any:
    if isinstance(value, Record):
        return value.model_dump(**options)
    if isinstance(value, (tuple, list)):
        items = [_plain(v, options) for v in value]
        return items if options["mode"] == "json" else tuple(items)
    if isinstance(value, dict):
        return {k: _plain(v, options) for k, v in value.items()}
    return value.to_json() if options["mode"] == "json" and hasattr(value, "to_json") else value


def _of_json(kind: Any, value: Any) -> Any:
    return kind.of_json(value)


R = TypeVar("R", bound=Record)


def read(kind: type[R], data: object, source: str, at: str = "") -> R:
    """Makes a record of type ``kind`` from JSON values. Raises BundleError naming ``source`` and the first wrong field.

    ``at`` is the path of the field of a larger record that contains this one, or "".
    """
    try:
        return kind.model_validate(data)
    except msgspec.ValidationError as e:
        where, what = _located(kind, data, e)
        where = ".".join(filter(None, (at, where)))
        raise BundleError(": ".join(filter(None, (source, where, what))), hint="Export the bundle again.") from e


def parse_versioned(text: str | bytes, newest: int, source: str, *, oldest: int = 1) -> dict[str, Any]:
    """Returns the JSON object of a bundle's file ``source``.

    Raises BundleError, with a hint, if it isn't JSON, or if its ``format_version`` isn't from ``oldest`` to ``newest``.
    """
    try:
        data: dict[str, Any] = parse_shown(text)
    except ValueError as e:
        raise BundleError(f"{source}: not JSON: {e}", hint="Export the bundle again.") from e
    version = data.get("format_version") if isinstance(data, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise BundleError(f"{source}: format_version is missing or wrong", hint="Export the bundle again.")
    if version < oldest:
        raise BundleError(f"{source}: format_version {version} is unsupported", hint="Export the bundle again.")
    if version > newest:
        raise BundleError(
            f"{source}: format_version is {version}, and this Enginewright reads up to {newest}",
            hint="Install a newer enginewright, or export the model again with this one.",
        )
    return data


def _located(kind: type[Record], data: object, error: msgspec.ValidationError) -> tuple[str, str]:
    """Returns (path, problem): the path of the wrong field of ``data``, and the problem with it.

    msgspec doesn't name the wrong key of a mapping. It is the first key whose entry fails alone.
    """
    text = str(error)
    match = _PLACE.search(text)
    what = text[: match.start()] if match else text
    parts = _PARTS.findall(match[2]) if match else []
    path: list[str | int] = []
    for name, index, _ in parts:
        path.append(name or (int(index) if index else _wrong_key(kind, data, path, text)))
    if match and match[1]:
        path.append(_wrong_key(kind, data, path, text))
    if named := _NAMED.match(what):
        path.append(named[1])
        what = "it is missing" if "missing" in what else "there is no such field"
    return ".".join(map(str, path)), what


def _wrong_key(kind: type[Record], data: object, path: list[str | int], text: str) -> str:
    there: Any = data
    for part in path:
        there = there[part]
    for key in there:
        try:
            msgspec.convert(_with(data, path, {key: there[key]}), kind, dec_hook=_of_json)
        except msgspec.ValidationError as e:
            if str(e) == text:
                return str(key)
    return "..."


def _with(data: Any, path: list[str | int], value: object) -> Any:
    """Returns a copy of ``data`` in which the value at ``path`` (keys and indices) is ``value``."""
    if not path:
        return value
    copy = data.copy()
    copy[path[0]] = _with(data[path[0]], path[1:], value)
    return copy
