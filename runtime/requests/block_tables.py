"""A request's block tables, with a version number that changes with every change of a table."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import TypeVar, overload

T = TypeVar("T")

NO_BLOCK = -1
_versions = itertools.count(1)


class BlockTables(Mapping[str, Sequence[int]]):
    """The block numbers (i32) of a request, by cache group, in the order of its tokens. NO_BLOCK marks a released
    block.

    Tables are read as lists, and changed only by the methods below. Each change sets a new version, so that data
    derived from a table can be recognized as stale.

    Attributes:
        version: a number that no other state of any request's tables has.
    """

    __slots__ = ("_tables", "version")

    def __init__(self) -> None:
        self._tables: dict[str, array[int]] = {}
        self.version = next(_versions)

    def put(self, group: str, blocks: Iterable[int]) -> None:
        """Replaces the block table of a cache group."""
        self.version = next(_versions)
        self._tables[group] = array("i", blocks)

    def replace(self, tables: Mapping[str, Iterable[int]]) -> None:
        """Replaces the block tables of all cache groups."""
        self.version = next(_versions)
        self._tables = {group: array("i", blocks) for group, blocks in tables.items()}

    def extend(self, group: str, blocks: Iterable[int]) -> None:
        """Appends blocks to a group's table; creates the table if there is none."""
        self.version = next(_versions)  # before: an error of ``blocks`` leaves those that came before it
        self._tables.setdefault(group, array("i")).extend(blocks)

    def cut(self, group: str, length: int) -> None:
        """Shortens the block table of a cache group to its first ``length`` blocks."""
        self.version = next(_versions)
        del self._tables[group][length:]

    def drop(self, group: str, place: int) -> None:
        """Replaces the block at index ``place`` of a cache group's table by NO_BLOCK."""
        self.version = next(_versions)
        self._tables[group][place] = NO_BLOCK

    def __getitem__(self, group: str) -> Sequence[int]:
        return self._tables[group]

    @overload
    def get(self, group: str, /) -> Sequence[int] | None: ...
    @overload
    def get(self, group: str, default: Sequence[int], /) -> Sequence[int]: ...
    @overload
    def get(self, group: str, default: T, /) -> Sequence[int] | T: ...
    def get(self, group: str, default: object = None, /) -> object:
        return self._tables.get(group, default)

    def items(self) -> ItemsView[str, Sequence[int]]:
        return self._tables.items()

    def values(self) -> ValuesView[Sequence[int]]:
        return self._tables.values()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __repr__(self) -> str:
        return f"BlockTables({self._tables}, version {self.version})"
