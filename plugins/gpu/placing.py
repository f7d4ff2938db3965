"""Keeps block tables on the device, where a step changes some entries, and inserts tokens that the step before has
drawn.

It doesn't need torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from enginewright.runtime.shared.contracts import CacheGroup, Int32Array
from enginewright.runtime.shared.step_schema import BLOCK_TABLE, Array, group_port

from .call import Argument, Call

SOURCES, CHANGED = "sources", "changed"
"""The names of arrays that are uploaded for ``place_call``: each token's row in the step before (or -1), and the number
of changes.
"""

PLACED = ("ids", SOURCES, "drawn", "tables", "changes", "count")
"""The names of the arrays that the kernel reads and writes."""

_PIECE, _PROGRAMS = 256, 8
_FARTHEST_TILE = 128
"""The most keys of a tile, and so the most keys before a window that a kernel reads and masks."""


def place_call(arrays: Mapping[str, Argument], tokens: int, vocab: int) -> Call:
    """Returns the call that writes drawn tokens and changes of block tables, before a step of ``tokens`` tokens.

    ``arrays`` has the arrays of ``PLACED``, as ``place_kernel`` describes them.
    """
    arguments = {name: arrays[name] for name in PLACED} | {"total": tokens, "vocab": vocab}
    return Call("place", arguments, {"PIECE": _PIECE}, (max(-(-tokens // _PIECE), _PROGRAMS), 1, 1))


class TableChanges:
    """The block tables that the device has after the submitted steps, with which the next step's tables are compared.

    Args:
        groups: the cache groups.
        requests: the most requests of a step.
        blocks: the most blocks of a request.
    """

    def __init__(self, groups: Sequence[CacheGroup], requests: int, blocks: int) -> None:
        self._groups = groups
        width = -(-blocks // 4) * 4  # each group's tables begin at a multiple of 16 bytes
        self._tables = np.full((len(groups), requests, width), -1, np.int32)
        self._used: list[tuple[int, ...]] = [(0, 0)] * len(groups)  # rows and columns that aren't all -1
        self._last: list[Array | None] = [None] * len(groups)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the memory of all tables: (groups, requests, blocks)."""
        return self._tables.shape

    def write(self, arrays: Mapping[str, Array], staged: Int32Array) -> int:
        """Writes the changes of a step's tables to ``staged`` [changes, 2]: an index in the memory of all tables, and
        its new value.

        Returns the number of changes, which is at most the number of entries in ``shape``. ``arrays`` has the step's
        tables.
        """
        count = 0
        for number, group in enumerate(self._groups):
            table = arrays[group_port(BLOCK_TABLE, group.name)]
            if table is self._last[number]:  # a step's arrays are never written to again
                continue
            self._last[number] = table
            used = self._used[number]
            self._used[number] = (len(table), table.shape[1])
            now = self._tables[number, : max(used[0], len(table)), : max(used[1], table.shape[1])]
            after = np.full(now.shape, -1, np.int32)
            part = after[: len(table), : table.shape[1]]
            part[:] = table
            if group.window:
                self._fill_before_windows(part, now[: len(table), : table.shape[1]], group.block_size)
            rows, columns = np.nonzero(now != after)
            values = after[rows, columns]
            now[rows, columns] = values
            _, requests, blocks = self._tables.shape
            staged[count : count + len(rows), 0] = (number * requests + rows) * blocks + columns
            staged[count : count + len(rows), 1] = values
            count += len(rows)
        return count

    def forget(self) -> None:
        """Makes the next step write all entries, because it is unknown which of them the device has."""
        self._tables.fill(-2)
        self._used = [self._tables.shape[1:]] * len(self._groups)
        self._last = [None] * len(self._groups)

    @staticmethod
    def _fill_before_windows(table: Int32Array, now: Int32Array, size: int) -> None:
        """Replaces the entries of -1 before each request's window.

        Directly before the window, a block of the request takes their place, since a tile may begin there, and reads
        and masks its keys. Elsewhere, the entry that the device has takes their place, as no kernel reads it.
        """
        first = (table >= 0).argmax(axis=1)[:, None]
        columns = np.arange(table.shape[1])
        before = columns < first
        near = before & (columns >= first - max(_FARTHEST_TILE // size, 1))
        np.copyto(table, now, where=before & ~near)
        np.copyto(table, np.take_along_axis(table, first, axis=1), where=near)
