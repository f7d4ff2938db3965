"""Functions that no schema can be made of. What can is in test_chat_like_transformers.py."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import reduce
from typing import Any, cast

import pytest

from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.text.tool_schema import tool_schema


class Empty(enum.Enum):
    pass


def bare(a: int) -> None: ...


def unsaid(a: int, b: int) -> None:
    """Adds.

    Args:
        a: One.
    """


def untyped(a) -> None:  # type: ignore[no-untyped-def]
    """Adds."""


def strange(a: Callable[[], None]) -> None:
    """Calls."""


def uneven(a: tuple[int, ...]) -> None:
    """Calls."""


def without_values(a: Empty) -> None:
    """Calls."""


def unknown(a: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Calls."""


def choices(a: int) -> None:
    """Calls.

    Args:
        a: One (choices: [1, )
    """


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (bare, "bare has no docstring"),
        (unsaid, "unsaid: the docstring says nothing about 'b'"),
        (untyped, "untyped: argument 'a' has no type hint"),
        (strange, r"strange: a: there is no JSON schema for the type .*Callable"),
        (uneven, "uneven: a: there is no JSON schema"),
        (without_values, r"without_values: a: \[\] are not all"),
        (unknown, "unknown: its type hints can't be read: name 'Nowhere'"),
        (choices, "choices: the choices of 'a' aren't a JSON list"),
        (print, "neither a JSON schema nor a function"),
        (5, "5 is neither a JSON schema nor a function"),
        (reduce(lambda inner, _: [inner], range(3000), cast(Any, [])), "<list> is neither a JSON"),
    ],
)
def test_what_has_no_schema(tool: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"tools: .*{message}"):
        tool_schema(tool)


def test_a_schema_stays_as_it_is() -> None:
    schema = {"name": "f"}
    assert tool_schema(schema) is schema


def test_a_result_without_a_type_is_left_out() -> None:
    def look() -> Callable[[], None]:
        """Looks."""
        return lambda: None

    assert tool_schema(look)["function"].keys() == {"name", "description", "parameters"}
