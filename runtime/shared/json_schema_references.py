"""References of a JSON schema: the part of the document that each ``$ref`` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin


class References:
    """Finds the targets of references in one document.

    ``$id`` begins a resource of its own, within which references are resolved, unless it is a fragment alone.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._indexed = False
        self._resources: dict[int, tuple[Any, str]] = {}  # of schemas outside the root's resource
        self._uris: dict[str, Any] = {}
        self._anchors: dict[tuple[int, str], Any] = {}

    def target(self, schema: Mapping[str, Any]) -> Any:
        """Returns the schema that the ``$ref`` of a schema names; None if the document doesn't have it."""
        if not self._indexed:
            self._index()
        resource, base = self._resources.get(id(schema), (self._root, self._base))
        reference = schema["$ref"]
        if not reference.startswith("#"):
            uri, fragment = urldefrag(_joined(base, reference))
            resource = self._uris.get(uri)
            if resource is None:
                return None
        else:
            fragment = reference[1:]
        fragment = unquote(fragment)
        if fragment.startswith("/"):
            target = at_pointer(resource, fragment)
        else:
            target = resource if not fragment else self._anchors.get((id(resource), fragment))
        return target if isinstance(target, (dict, bool)) else None

    def _index(self) -> None:
        self._indexed = True
        identifier = self._root.get("$id") if isinstance(self._root, dict) else None
        self._base = urldefrag(identifier)[0] if isinstance(identifier, str) else ""
        if self._base:
            self._uris[self._base] = self._root
        waiting: list[tuple[Any, Any, str]] = [(self._root, self._root, self._base)]
        while waiting:
            value, resource, base = waiting.pop()
            if isinstance(value, list):
                waiting += [(one, resource, base) for one in value]
            elif isinstance(value, dict):
                identifier = value.get("$id")
                if value is not self._root and isinstance(identifier, str) and not identifier.startswith("#"):
                    base = urldefrag(_joined(base, identifier))[0]
                    resource = value
                    self._uris.setdefault(base, value)
                if resource is not self._root:
                    self._resources[id(value)] = resource, base
                if isinstance(anchor := value.get("$anchor", value.get("$dynamicAnchor")), str):
                    self._anchors.setdefault((id(resource), anchor), value)
                waiting += [
                    (one, resource, base)
                    for name, one in value.items()
                    if name not in ("const", "enum", "default", "examples") and isinstance(one, (dict, list))
                ]


def at_pointer(document: Any, pointer: str) -> Any:
    """Returns the part of a document at a JSON pointer (RFC 6901) such as "/$defs/a"; None if it has no such part."""
    target = document
    for part in pointer[1:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping):
            target = target.get(part)
        elif isinstance(target, list) and part.isdecimal() and len(part) < 8 and int(part) < len(target):
            target = target[int(part)]
        else:
            return None
    return target


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference
