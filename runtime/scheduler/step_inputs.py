"""The arrays of each step. Most steps decode for the requests of the step before: their arrays follow from its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from enginewright.runtime.requests.logit_rules import RowLists
from enginewright.runtime.requests.request import Request
from enginewright.runtime.requests.structured import Guided, Masks

from ..shared.contracts import CacheGroup, Int32Array, SamplingBatch, StepInput
from .base import Chunk, step_input


class StepInputs:
    """Makes the arrays of one step after the other. Arrays that were given out are never written to again.

    This is Python between two steps, while the cores wait, so a step of decodes costs a few additions.
    """

    def __init__(self, groups: Mapping[str, CacheGroup], windows: Sequence[str] = (), masks: bool = True) -> None:
        self._groups = groups
        self._masks = masks  # whether they go to the executor; else lists
        self._windows = windows  # groups whose tables get holes
        self._requests: list[Request] = []  # of the last step, where each decoded a token
        self._changing = False  # whether the rules of some may say something else each step
        self._guided: list[Guided] = []  # of its rows
        self._lists: RowLists | None = None  # what they say, from the second such step on
        self._starts: list[int] = []  # where each of them is when that step was committed
        self._last: StepInput | None = None

    def build(self, chunks: Sequence[Chunk]) -> StepInput:
        """See ``contracts.StepInput``."""
        requests = [chunk.request for chunk in chunks]
        starts = [chunk.start for chunk in chunks]
        again = self._last is not None and requests == self._requests and starts == self._starts
        if self._last is not None and again and all(chunk.count == 1 for chunk in chunks):
            step = self._next(self._last)
        else:
            step = step_input(chunks, self._groups)
            # Sequences of a beam search change their blocks.
            decodes = all(chunk.count == 1 and chunk.samples and chunk.request.search is None for chunk in chunks)
            listed = step.sampling is not None and step.sampling.masks is not None and not self._masks
            self._requests = requests if decodes and not listed else []
            self._changing = any(one.rules is not None and one.rules.changing for one in self._requests)
            self._lists = None
            grammars = [(i, one.rules.grammar) for i, one in enumerate(self._requests) if one.rules is not None]
            self._guided = [Guided(grammar, i, ()) for i, grammar in grammars if grammar is not None]
            if listed and step.sampling is not None:
                step.sampling = step.sampling.with_lists()
        self._starts = [start + 1 for start in starts]
        self._last = step
        return step

    def forget(self) -> None:
        """The next step doesn't follow from the last one."""
        self._requests, self._last = [], None

    def _next(self, last: StepInput) -> StepInput:
        """The step after ``last`` in which all its requests decode again."""
        assert last.sampling is not None
        tables, slots = {}, {}
        for name, group in self._groups.items():
            tables[name], slots[name] = self._moved(name, group.block_size, last)
        return StepInput(
            ids=np.array([request.tokens[-1] for request in self._requests], np.int32),
            positions=last.kv_len,
            q_start=last.q_start,
            kv_len=last.kv_len + 1,
            block_tables=tables,
            slots=slots,
            rows=last.rows,
            sampling=self._drawn_next(last.sampling),
        )

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

    def _moved(self, group: str, size: int, last: StepInput) -> tuple[Int32Array, Int32Array]:
        """Block table and slots one token further. A running request's blocks stay; it only gets more of them."""
        table, slots = last.block_tables[group], last.slots[group] + 1
        begun = [b for b, start in enumerate(self._starts) if start % size == 0]  # these come to another block
        if begun:
            width = max(self._starts[b] // size for b in begun) + 1
            wider = np.full((len(table), max(width, table.shape[1])), -1, np.int32)
            wider[:, : table.shape[1]] = table
            table = wider
        for b in begun:
            at = self._starts[b] // size
            table[b, at] = block = self._requests[b].tables[group][at]
            slots[b] = block * size
        if group in self._windows:
            table = self._without_given_back(table, self._groups[group], copied=bool(begun))
        return table, slots

    def _without_given_back(self, table: Int32Array, group: CacheGroup, *, copied: bool) -> Int32Array:
        """Copies the table with holes before the windows; see ``CacheManager``."""
        for b, start in enumerate(self._starts):
            before = start - group.window + 1
            if before > 0 and before % group.block_size == 0:  # the block before that is no longer seen
                table = table if copied else table.copy()
                table[b, before // group.block_size - 1] = -1
                copied = True
        return table
