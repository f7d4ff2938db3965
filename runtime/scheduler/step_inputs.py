"""The arrays of each step. Most steps decode the same requests as the step before, and update its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from enginewright.runtime.requests.logit_rules import RowLists
from enginewright.runtime.requests.structured import Guided, Masks

from ..shared.contracts import STATE, CacheGroup, Int32Array, SamplingBatch, StepInput
from ..shared.step_schema import BLOCK_TABLE, IDS, KV_LEN, POSITIONS, SLOTS, group_port, provided
from .base import Chunk, step_input


class _GroupArrays(NamedTuple):
    """A cache group, and the names of its block table and slots among a step's arrays."""

    group: CacheGroup
    table: str
    slots: str


class StepInputs:
    """Makes the arrays of successive steps. Returned arrays are never written to again.

    Args:
        groups: the cache groups by name.
        masks: False if the executor takes lists of tokens instead of masks.
        ports: the program's input arrays besides those of every step, as in ``ExecutorCaps.ports``.
        outputs: names of the outputs to compute in every step.
    """

    def __init__(
        self,
        groups: Mapping[str, CacheGroup],
        masks: bool = True,
        ports: Sequence[str] = (),
        outputs: Sequence[str] = (),
    ) -> None:
        self._groups, self._masks, self._ports, self._outputs = groups, masks, tuple(ports), outputs
        self._arrays = [
            _GroupArrays(group, group_port(BLOCK_TABLE, name), group_port(SLOTS, name))
            for name, group in groups.items()
        ]
        self._last: DecodeStep | None = None  # None if the last step had other chunks than decodes

    def build(self, chunks: Sequence[Chunk]) -> StepInput:
        """Makes the step input of these chunks. If they follow the last step, its arrays are updated."""
        last, self._last = self._last, None  # after an error nothing follows from the last step
        if last is not None and last.is_followed_by(chunks):
            self._last = last.next(chunks)
            return self._last.step
        step = step_input(chunks, self._groups, self._ports, self._outputs)
        if step.sampling is not None and step.sampling.masks is not None and not self._masks:
            step.sampling = step.sampling.with_lists()
        elif all(chunk.count == 1 and chunk.samples and chunk.request.search is None for chunk in chunks):
            # Not of a beam search, whose sequences take each other's tokens.
            self._last = DecodeStep(step, chunks, self._arrays, self._ports)
        return step


class DecodeStep:
    """A step in which each request decodes one token. ``next`` derives the next step's arrays from its arrays.

    Only rows whose block tables have a new version are read again. ``next`` does little work, because the cores wait
    for its result.

    Args:
        step: the arrays of the step.
        chunks: the last token of each request.
        groups: the cache groups.
        ports: the program's input arrays besides those of every step.

    Attributes:
        step: the arrays of the step; of the newest step after ``next``.
    """

    def __init__(
        self, step: StepInput, chunks: Sequence[Chunk], groups: Sequence[_GroupArrays], ports: Sequence[str]
    ) -> None:
        self.step = step
        self._arrays = step.arrays  # without the slots of snapshots, which are set in a copy of it
        self._groups, self._ports = groups, ports
        self._requests = [chunk.request for chunk in chunks]
        self._starts = [chunk.start + 1 for chunk in chunks]  # of the next step's tokens
        self._tables = [request.tables for request in self._requests]
        self._versions = [tables.version for tables in self._tables]  # of the tables in ``step``
        self._rules = [request.rules for request in self._requests]
        self._changing = any(rules is not None and rules.changing for rules in self._rules)
        self._lists: RowLists | None = None  # the rules' lists, from the second step on
        grammars = [None if rules is None else rules.grammar for rules in self._rules]
        self._guided = [Guided(grammar, row, ()) for row, grammar in enumerate(grammars) if grammar is not None]

    def is_followed_by(self, chunks: Sequence[Chunk]) -> bool:
        """Returns True if ``chunks`` are the next token of each request, after one or several runs of this step."""
        if [chunk.request for chunk in chunks] != self._requests:
            return False
        if 0 < (more := chunks[0].start - self._starts[0]) < self.step.runs:
            self._starts = [start + more for start in self._starts]
        starts, counts = [chunk.start for chunk in chunks], [chunk.count for chunk in chunks]
        return starts == self._starts and counts == [1] * len(chunks)

    def next(self, chunks: Sequence[Chunk]) -> DecodeStep:
        """Returns this object with the arrays of the next step, which has ``chunks``."""
        last, changed = self.step, self._changed_tables()
        assert last.sampling is not None
        tokens = chunks[0].start + 1 - int(self._arrays[KV_LEN][0])
        arrays = self._arrays.copy()  # rows, and where requests begin, are the same
        arrays[IDS] = np.array([request.tokens[-1] for request in self._requests], np.int32)
        arrays[KV_LEN] = arrays[KV_LEN] + tokens
        arrays[POSITIONS] = arrays[KV_LEN] - 1
        for group, table, slots in self._groups:
            arrays[table], arrays[slots] = self._moved(group, arrays[table], arrays[slots], changed, tokens)
        if self._ports:
            arrays.update(provided(self._ports, chunks))
        self._arrays = arrays
        self.step = StepInput(arrays, sampling=self._next_sampling(last.sampling, tokens), outputs=last.outputs)
        self._starts = [start + 1 for start in self._starts]
        return self

    def _changed_tables(self) -> list[int]:
        """Returns the requests (rows of block tables) whose tables have changed since the last step."""
        versions = [tables.version for tables in self._tables]
        if versions == self._versions:
            return []
        changed = [b for b, version in enumerate(versions) if version != self._versions[b]]
        self._versions = versions
        return changed

    def _next_sampling(self, last: SamplingBatch, tokens: int) -> SamplingBatch:
        """Returns the sampling state ``tokens`` tokens after ``last``. Parameters stay, lists of tokens are updated."""
        sampling = last.following(tokens)
        if self._changing and self._lists is None:
            self._lists = RowLists(sampling, self._rules)
        elif self._lists is not None:
            self._lists.put(sampling)
        if self._guided:
            sampling.masks = Masks(self._guided, len(self._requests))
        return sampling

    def _moved(
        self, group: CacheGroup, table: Any, last_slots: Any, changed: Sequence[int], tokens: int
    ) -> tuple[Int32Array, Int32Array]:
        """Returns the block table [B, M] and the slots [B] of the next token. The slots of states stay.

        Args:
            group: the cache group.
            table, last_slots: its arrays in the last step.
            changed: rows of the table that are read anew; the others stay.
            tokens: the tokens that each request has got since then.
        """
        slots, size = last_slots if group.kind == STATE else last_slots + tokens, group.block_size
        if changed:
            rows = [self._tables[b][group.name] for b in changed]
            more = max(map(len, rows)) - table.shape[1]
            table = np.pad(table, ((0, 0), (0, more)), constant_values=-1) if more > 0 else table.copy()
            for b, row in zip(changed, rows, strict=True):
                table[b, : len(row)] = row
                table[b, len(row) :] = -1
        if group.kind == STATE:
            return table, slots
        moved = [b for b, start in enumerate(self._starts) if start % size < tokens]  # these come to another block
        for b in {*moved, *changed} if changed else moved:
            at = self._starts[b]
            slots[b] = table[b, at // size] * size + at % size
        return table, slots
