"""Every field of every body has a limit, which is checked before it is looked at, and which SECURITY.md lists."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginewright.runtime.server.app import BODIES
from enginewright.runtime.server.http import limits
from enginewright.runtime.server.http.fields import decoded
from enginewright.runtime.server.http.limits import SCALAR, Bound, Most, Sizes, bound_of, rows, split, value_of
from enginewright.runtime.server.protocols.bodies import ChatBody
from enginewright.runtime.shared.errors import ContextError, RequestError
from enginewright.runtime.tasks.context import GENERATE
from tests.runtime.server.in_process import InProcess

SIZES = Sizes(vocabulary=256, context=64)
FIELDS = {path: kind.__struct_fields__ for path, kind in BODIES.items()}
ROWS = [*rows(FIELDS, {path: kind.bounds for path, kind in BODIES.items()})]
HEAD = ["| endpoints | field | bound | where |", "| --- | --- | --- | --- |"]


def shown_rows() -> list[str]:
    """The rows of SECURITY.md's table."""
    lines = []
    for names, bound, paths in ROWS:
        where = ", ".join(f"`{path}`" for path in paths) if names else "all of these"
        fields = ", ".join(f"`{name}`" for name in names) or "any other"
        lines.append(f"| {where} | {fields} | {bound} | `limits.value_of` |")
    return lines


def test_security_md_has_the_table(repository: Path, request: pytest.FixtureRequest) -> None:
    page = repository / "SECURITY.md"
    text = page.read_text(encoding="utf-8")
    begin = text.index("\n".join(HEAD))
    end = text.index("\n\n", begin)
    expected = "\n".join([*HEAD, *shown_rows()])
    if request.config.getoption("--update-golden"):
        page.write_text(text[:begin] + expected + text[end:], encoding="utf-8")
        return
    assert text[begin:end] == expected, "run this test with --update-golden"


def test_no_bound_is_for_a_field_that_no_body_has() -> None:
    assert all(paths for _, _, paths in ROWS)


def too_much(bound: Bound, sizes: Sizes) -> Iterator[tuple[str, Any]]:
    """The name of each limit of a bound in its error, with the smallest value that exceeds it."""
    if characters := bound.characters.of(sizes):
        yield "characters", "x" * (characters + 1)
        if bound.values.of(sizes) > 2:
            yield "characters", {"x" * characters: "y"}
            yield "characters", [{"a": ["é" * characters]}]
    if bound.items is not None and bound.items.of(sizes) + 1 < bound.values.of(sizes):
        yield "there are", [0] * (bound.items.of(sizes) + 1)
    values = bound.values.of(sizes)
    yield "values", [0] * values
    yield "values", [[]] * values
    yield "values", {str(i): 0 for i in range(values)}
    if values > 111:
        yield "nested", json.loads("[" * 111 + "]" * 111)
    yield "digits", 10**400


def at_most(bound: Bound, sizes: Sizes) -> Iterator[Any]:
    """The most that each limit takes."""
    if characters := bound.characters.of(sizes):
        yield "x" * characters
        if bound.values.of(sizes) > 2:
            yield ["x" * characters]
            yield ["\n" * characters]  # twice as long as JSON
    if items := bound.values.of(sizes) - 1:
        yield [0] * (items if bound.items is None else min(items, bound.items.of(sizes)))
    yield 10**399
    if bound.values.of(sizes) > 110:
        yield json.loads("[" * 110 + "]" * 110)


@pytest.mark.parametrize(("names", "bound", "paths"), ROWS, ids=["+".join(names) or "other" for names, _, _ in ROWS])
def test_a_field_is_refused_beyond_each_of_its_limits(names: list[str], bound: Bound, paths: list[str]) -> None:
    for limit, value in too_much(bound, SIZES):
        with pytest.raises(RequestError, match=f"^odd: .*{limit}"):
            value_of("odd", raw(value), SIZES, bound)
    for value in at_most(bound, SIZES):
        assert value_of("odd", raw(value), SIZES, bound) == value
    assert all(BODIES[path].bound(name) == bound for name in names for path in paths)


def raw(value: Any) -> Any:
    return split(json.dumps({"odd": value}).encode())["odd"]


def test_each_endpoint_refuses_each_field_by_its_name(tiny_bundle: Path) -> None:
    async def check() -> None:
        app = InProcess(tiny_bundle)
        sizes = app.front.sizes("m", GENERATE)
        for path, kind in BODIES.items():
            for name in kind.__struct_fields__:
                limit, value = next(too_much(bound := kind.bound(name), sizes))
                reply = await app.ask(path, {"model": "m", name: value})
                problem = reply.json["error"]
                message = problem if isinstance(problem, str) else problem["message"]
                assert reply.status == 400, reply.body[:300]
                if bound.prompt:
                    assert "maximum context length" in message or "prompt is too long" in message, message
                else:
                    assert message.startswith(f"{name}: ") and limit in message, message
                if path == "/v1/messages":
                    assert reply.json["type"] == "error" and problem["type"] == "invalid_request_error"
        assert app.front.model("m").state == "unloaded", "no engine was asked"
        await app.front.close()

    asyncio.run(check())


def test_text_that_becomes_a_prompt_is_more_than_the_context_has() -> None:
    """Agents shorten a conversation when they read this error's code."""
    for name in ("messages", "input", "prompt", "system", "content"):
        bound = bound_of(name)
        with pytest.raises(ContextError, match=f"^{name}: "):
            value_of(name, split(json.dumps({name: "x" * 10**6}).encode())[name], SIZES)
        assert bound.prompt
    assert not SCALAR.prompt


def test_a_body_has_a_bounded_number_of_fields() -> None:
    body = {f"f{i}": 0 for i in range(5000)}
    with pytest.raises(RequestError, match="the body: it has more than 256 fields"):
        split(json.dumps(body).encode())
    assert len(split(json.dumps({f"f{i}": [0] * 100 for i in range(256)}).encode())) == 256


def test_a_refused_or_harmless_field_is_not_looked_at() -> None:
    long = [0] * 100_000
    assert decoded(json.dumps({"messages": [], "metadata": long}).encode(), ChatBody)[1] == ["metadata"]
    with pytest.raises(RequestError, match=r"^functions: it is the older name of tools"):
        decoded(json.dumps({"messages": [], "functions": long}).encode(), ChatBody)
    with pytest.raises(RequestError, match=r"^'odd': there is no such field"):
        decoded(json.dumps({"messages": [], "odd": long}).encode(), ChatBody)


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 4 or kind < 0.4:
        return rng.choice([1, None, True, "a,b[{", "\\", '\\"', '"', "x\\\\", "", "}]", "é"])
    if kind < 0.7:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    return {f'k{i}\\"{{': value(rng, depth + 1) for i in range(rng.randint(0, 4))}


def inner(value: Any) -> list[Any]:
    return value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 18])
def test_measures_are_those_of_the_decoded_value(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Wherever the bytes are cut into pieces. Empty lists and objects count twice."""

    def values(one: Any) -> int:
        return 1 + sum(map(values, inner(one))) + (one in ([], {}))

    def levels(one: Any) -> int:
        return 1 + max(map(levels, inner(one)), default=0) if isinstance(one, (list, dict)) else 0

    monkeypatch.setattr(limits, "_PIECE", piece)
    rng = random.Random(piece)
    for _ in range(100):
        body = {"a": value(rng), "b": value(rng)}
        data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode()
        assert limits._measured(data, len(data)) == (values(body), 2, levels(body)), data


def test_digits_in_texts_do_not_count() -> None:
    body = {"user": "1" * 500 + '\\"' + "2" * 500, "seed": 10**399}
    fields = split(json.dumps(body).encode())
    assert value_of("user", fields["user"], SIZES) == body["user"]
    assert value_of("seed", fields["seed"], SIZES) == body["seed"]
    with pytest.raises(RequestError, match=r"^seed: a number of more than 400 digits"):
        value_of("seed", split(b'{"seed": [1.' + b"0" * 401 + b"]}")["seed"], SIZES)


def test_a_limit_reads_as_it_is_computed() -> None:
    assert str(Most(1_024, vocabulary=1, context=64)) == "1,024 + vocabulary + 64 x context"
    assert str(Most(0)) == "0" and Most(1, 2, 3).of(Sizes(10, 100)) == 321
