"""The table of routes: what openapi.json says of it, and values of a query."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request

from enginewright.runtime.server.app import BODIES
from enginewright.runtime.server.http.errors import ApiError
from enginewright.runtime.server.http.routes import from_query
from tests.runtime.server.conftest import Server


def values(document: Any) -> Iterator[tuple[str, Any]]:
    """All pairs of keys and values, at any depth."""
    children = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in children:
        yield str(key), value
        if isinstance(value, (dict, list)):
            yield from values(value)


def test_openapi_describes_each_route(server: Server) -> None:
    document = server.ask("GET", "/openapi.json").json
    assert document["openapi"] == "3.1.0" and document["info"]["title"] == "Enginewright"
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names)) > 20
    assert all(operation["summary"] and operation["responses"]["200"]["description"] for operation in operations)
    for path, methods in document["paths"].items():
        declared = {one["name"] for operation in methods.values() for one in operation.get("parameters", [])}
        assert declared == set(re.findall(r"{(\w+)}", path)), path
    assert set(document["paths"]["/v1/responses/{name}"]) == {"get", "delete"}
    for path in BODIES:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["type"] == "object" and schema["properties"], path
    assert not [value for key, value in values(document) if key == "$ref"]
    fields = document["paths"]["/api/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"type": "null"} in fields["properties"]["raw"]["anyOf"], "null is as good as a field that is left out"
    for field, kind in (("input", "/api/embed"), ("input", "/v1/embeddings")):
        schema = document["paths"][kind]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert {"type": "null"} not in schema["properties"][field]["anyOf"], "there it isn't"


def test_every_route_that_is_described_is_there(server: Server) -> None:
    for path, methods in server.ask("GET", "/openapi.json").json["paths"].items():
        for method in methods:
            status = server.ask(method.upper(), re.sub(r"{\w+}", "none", path), {} if method == "post" else None).status
            assert status not in (405, 500), (method, path)


@pytest.mark.parametrize(
    ("query", "expected"), [("", 20), ("limit=7", 7), ("limit=0", 0), ("limit=x", None), ("limit=1.5", None)]
)
def test_a_value_of_the_query(query: str, expected: int | None) -> None:
    request = Request({"type": "http", "query_string": query.encode()})
    if expected is None:
        with pytest.raises(ApiError, match="limit: it isn't a value of its type"):
            from_query(request, "limit", 20)
    else:
        assert from_query(request, "limit", 20) == expected


def test_a_truth_value_of_the_query() -> None:
    for text, expected in (("true", True), ("1", True), ("false", False), ("0", False)):
        assert (
            from_query(Request({"type": "http", "query_string": f"stream={text}".encode()}), "stream", False)
            is expected
        )
