"""The table of routes, each with its function, and openapi.json, which describes them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .errors import ApiError
from .fields import Fields

Endpoint = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class Routes:
    """Collects routes. The first docstring line of a function is the summary of its route in openapi.json."""

    def __init__(self) -> None:
        self.all: list[Route] = []

    def add(self, path: str, function: Endpoint, *methods: str, listed: bool = True) -> None:
        """Adds a route for these methods.

        Args:
            path: the path, with parameters as Starlette writes them, such as ``{name:path}``.
            function: makes the response.
            methods: the HTTP methods.
            listed: True if openapi.json has the route.
        """
        self.all.append(Route(path, function, methods=list(methods), include_in_schema=listed))

    def get(self, path: str, *, listed: bool = True) -> Callable[[Endpoint], Endpoint]:
        """Returns a decorator that adds a route for GET. ``listed``: True if openapi.json has it."""
        return self._adder(path, "GET", listed)

    def post(self, path: str) -> Callable[[Endpoint], Endpoint]:
        """Returns a decorator that adds a route for POST."""
        return self._adder(path, "POST")

    def delete(self, path: str) -> Callable[[Endpoint], Endpoint]:
        """Returns a decorator that adds a route for DELETE."""
        return self._adder(path, "DELETE")

    def _adder(self, path: str, method: str, listed: bool = True) -> Callable[[Endpoint], Endpoint]:
        def add(function: Endpoint) -> Endpoint:
            self.add(path, function, method, listed=listed)
            return function

        return add

    def openapi(self, version: str, bodies: Mapping[str, type[Fields]]) -> dict[str, Any]:
        """Returns an OpenAPI 3.1 description of the routes. ``bodies``: the class of each path's POST body."""
        paths: dict[str, dict[str, Any]] = {}
        for route in self.all:
            if not route.include_in_schema:
                continue
            path = _PATTERN.sub(r"{\1}", route.path)
            for method in sorted(route.methods or set()):
                if method == "HEAD":  # Starlette adds it to GET
                    continue
                operation: dict[str, Any] = {
                    "summary": (route.endpoint.__doc__ or "").strip().partition("\n")[0],
                    "operationId": f"{method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_')}",
                    "responses": _RESPONSES,
                }
                if names := _PATTERN.findall(route.path):
                    string = {"type": "string"}
                    operation["parameters"] = [
                        {"name": name, "in": "path", "required": True, "schema": string} for name in names
                    ]
                if method == "POST" and path in bodies:
                    content = {"application/json": {"schema": body_schema(bodies[path])}}
                    operation["requestBody"] = {"required": True, "content": content}
                paths.setdefault(path, {})[method.lower()] = operation
        return {"openapi": "3.1.0", "info": {"title": "Enginewright", "version": version}, "paths": paths}


_PATTERN = re.compile(r"{(\w+)(?::\w+)?}")
_RESPONSES = {
    "200": {"description": "The answer."},
    "4XX": {"description": "What is wrong with the request, and where."},
    "503": {"description": "The model doesn't answer now; Retry-After says when to ask again."},
}


def body_schema(kind: type[Fields]) -> dict[str, Any]:
    """Returns the JSON schema of a body, without references to other schemas.

    A field that may be left out may be null instead.
    """
    (schema,), parts = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    name = schema["$ref"].rpartition("/")[2]
    inlined: dict[str, Any] = parts.pop(name)
    inlined.pop("title", None)
    for part, definition in parts.items():
        inlined = _inlined(inlined, f"#/components/schemas/{part}", definition)
    null, fields = {"type": "null"}, inlined["properties"]
    for field in set(fields) - set(inlined.get("required", ())) - kind.needed:
        if null not in fields[field].get("anyOf", ()):
            fields[field] = {"anyOf": [fields[field], null]}
    return inlined


def _inlined(value: Any, ref: str, found: Any) -> Any:
    if isinstance(value, dict):
        return found if value.get("$ref") == ref else {k: _inlined(v, ref, found) for k, v in value.items()}
    return [_inlined(one, ref, found) for one in value] if isinstance(value, list) else value


def from_query(request: Request, name: str, default: T) -> T:
    """Returns a value of the query, or ``default`` if the query doesn't have it.

    Raises ApiError (400) if the value isn't of the type of ``default``.
    """
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value: T = msgspec.convert(text, type(default), strict=False)
    except msgspec.ValidationError as e:
        raise ApiError(400, f"{name}: it isn't a value of its type", param=name) from e
    return value
