"""The arrays of each step. Most steps decode for the requests of the step before: their arrays follow from its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from enginewright.runtime.requests.block_tables import BlockTables
from enginewright.runtime.requests.logit_rules import RowLists
from enginewright.runtime.requests.request import Request
from enginewright.runtime.requests.structured import Guided, Masks

from ..shared.contracts import CacheGroup, Int32Array, SamplingBatch, StepInput
from ..shared.step_schema import BLOCK_TABLE, IDS, KV_LEN, POSITIONS, SLOTS, group_port, provided
from .base import Chunk, step_input


class StepInputs:
    """Makes the arrays of one step after the other. Arrays that were given out are never written to again.

    What is kept of the last step is used only where the block tables that it was made from are of the same version:
    rows of tables that have changed since are read again. So no caller has to say that something has changed.

    This is Python between two steps, while the cores wait, so a step of decodes costs a few additions.
    """

    def __init__(self, groups: Mapping[str, CacheGroup], masks: bool = True, ports: Sequence[str] = ()) -> None:
        self._groups, self._ports = groups, tuple(ports)  # what ``ExecutorCaps.ports`` names
        self._of_groups = [
            (name, group.block_size, group_port(BLOCK_TABLE, name), group_port(SLOTS, name))
            for name, group in groups.items()
        ]
        self._masks = masks  # whether they go to the executor; else lists
        self._requests: list[Request] = []  # of the last step, where each decoded a token
        self._tables: list[BlockTables] = []  # of these
        self._versions: list[int] = []  # of these tables, as the last step has them
        self._changing = False  # whether the rules of some may say something else each step
        self._guided: list[Guided] = []  # of its rows
        self._lists: RowLists | None = None  # what they say, from the second such step on
        self._starts: list[int] = []  # where each of them is when that step was committed
        self._last: StepInput | None = None

    def build(self, chunks: Sequence[Chunk]) -> StepInput:
        """Builds a ``contracts.StepInput``."""
        requests = [chunk.request for chunk in chunks]
        starts = [chunk.start for chunk in chunks]
        last, self._last = self._last, None  # after an error nothing follows from the last step
        again = last is not None and requests == self._requests and starts == self._starts
        if last is not None and again and all(chunk.count == 1 for chunk in chunks):
            step = self._next(last, chunks)
        else:
            step = step_input(chunks, self._groups, self._ports)
            # Sequences of a beam search take each other's tokens.
            decodes = all(chunk.count == 1 and chunk.samples and chunk.request.search is None for chunk in chunks)
            listed = step.sampling is not None and step.sampling.masks is not None and not self._masks
            self._requests = requests if decodes and not listed else []
            self._tables = [request.tables for request in self._requests]
            self._versions = [tables.version for tables in self._tables]
            self._changing = any(one.rules is not None and one.rules.changing for one in self._requests)
            self._lists = None
            grammars = [(i, one.rules.grammar) for i, one in enumerate(self._requests) if one.rules is not None]
            self._guided = [Guided(grammar, i, ()) for i, grammar in grammars if grammar is not None]
            if listed and step.sampling is not None:
                step.sampling = step.sampling.with_lists()
        self._starts = [start + 1 for start in starts]
        self._last = step
        return step

    def _next(self, last: StepInput, chunks: Sequence[Chunk]) -> StepInput:
        """The step after ``last`` in which all its requests decode again."""
        assert last.sampling is not None
        versions = [tables.version for tables in self._tables]
        changed = []
        if versions != self._versions:
            changed = [b for b, version in enumerate(versions) if version != self._versions[b]]
            self._versions = versions
        arrays = last.arrays.copy()  # rows, and where requests begin, are the same
        lengths = arrays[KV_LEN]
        arrays[IDS] = np.array([request.tokens[-1] for request in self._requests], np.int32)
        arrays[POSITIONS], arrays[KV_LEN] = lengths, lengths + 1
        for name, size, table, slots in self._of_groups:
            arrays[table], arrays[slots] = self._moved(name, size, arrays[table], arrays[slots], changed)
        if self._ports:
            arrays.update(provided(self._ports, chunks))
        return StepInput(arrays, sampling=self._drawn_next(last.sampling))

    def _drawn_next(self, last: SamplingBatch) -> SamplingBatch:
        """The parameters stay; what rules say of the next tokens may change."""
        sampling = last.following()
        if self._changing and self._lists is None:
            self._lists = RowLists(sampling, [request.rules for request in self._requests])
        elif self._lists is not None:
            self._lists.put(sampling)
        if self._guided:
            sampling.masks = Masks(self._guided, len(self._requests))
        return sampling

    def _moved(
        self, group: str, size: int, table: Any, last_slots: Any, changed: Sequence[int]
    ) -> tuple[Int32Array, Int32Array]:
        """Returns block table and slots one token further: rows ``changed`` are read anew, the others stay."""
        slots = last_slots + 1
        if changed:
            rows = [self._tables[b][group] for b in changed]
            more = max(map(len, rows)) - table.shape[1]
            table = np.pad(table, ((0, 0), (0, more)), constant_values=-1) if more > 0 else table.copy()
            for b, row in zip(changed, rows, strict=True):
                table[b, : len(row)] = row
                table[b, len(row) :] = -1
        moved = [b for b, start in enumerate(self._starts) if start % size == 0]  # these come to another block
        for b in {*moved, *changed} if changed else moved:
            at = self._starts[b]
            slots[b] = table[b, at // size] * size + at % size
        return table, slots
