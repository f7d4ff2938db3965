"""Tables of blocks: whatever changes one gives them another version."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from enginewright.runtime.requests.block_tables import NO_BLOCK, BlockTables
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.sampling import SamplingParams

CHANGES: dict[str, tuple[Callable[[BlockTables], None], dict[str, list[int]]]] = {
    "put": (lambda tables: tables.put("a", [9]), {"a": [9], "b": [4]}),
    "put another": (lambda tables: tables.put("c", []), {"a": [1, 2, 3], "b": [4], "c": []}),
    "replace": (lambda tables: tables.replace({"b": range(2)}), {"b": [0, 1]}),
    "extend": (lambda tables: tables.extend("a", iter([7])), {"a": [1, 2, 3, 7], "b": [4]}),
    "extend another": (lambda tables: tables.extend("c", [7]), {"a": [1, 2, 3], "b": [4], "c": [7]}),
    "cut": (lambda tables: tables.cut("a", 1), {"a": [1], "b": [4]}),
    "drop": (lambda tables: tables.drop("a", 1), {"a": [1, NO_BLOCK, 3], "b": [4]}),
}


def filled() -> BlockTables:
    tables = BlockTables()
    tables.replace({"a": [1, 2, 3], "b": [4]})
    return tables


def plain(tables: BlockTables) -> dict[str, list[int]]:
    return {name: list(table) for name, table in tables.items()}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_gives_another_version(change: str) -> None:
    tables, (make, expected) = filled(), CHANGES[change]
    before = tables.version
    make(tables)
    assert plain(tables) == expected and tables.version > before


def test_no_two_tables_ever_have_the_same_version() -> None:
    versions = [filled().version for _ in range(3)]
    tables = filled()
    for _ in range(3):
        tables.replace({"a": [1, 2, 3], "b": [4]})
        versions.append(tables.version)
    assert len(set(versions)) == 6


def test_blocks_that_came_before_an_error_are_there() -> None:
    def blocks() -> Iterator[int]:
        yield 8
        raise MemoryError

    tables = filled()
    before = tables.version
    with pytest.raises(MemoryError):
        tables.extend("a", blocks())
    assert plain(tables)["a"] == [1, 2, 3, 8] and tables.version > before


def test_a_request_has_one_object_for_its_whole_life() -> None:
    request = Generation([1], SamplingParams(max_tokens=1))
    tables, version = request.tables, request.tables.version
    request.tables = {"a": [5]}
    assert request.tables is tables and plain(tables) == {"a": [5]} and tables.version > version
    assert tables and tables.get("a") is tables["a"] and tables.get("b", ()) == () and list(tables) == ["a"]
    request.tables = {}
    assert not tables and not list(tables.values())
