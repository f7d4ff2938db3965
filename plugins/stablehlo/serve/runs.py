"""Chooses the modules for a run over slots: divides the run, and pads its parts to the modules' sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...steps.slots import Int64Array, SlotRun
from ..section import ModuleSection

_OVERHEAD = 16
"""The cost of another run, in tokens, since it reads the weights once more."""


@dataclass(frozen=True)
class Part:
    """The part of a run that one module computes, padded to its sizes.

    Attributes:
        module: the module.
        first: the first slot.
        ids: the tokens, [B, S].
        index: [B], the position in its slot of each row's first token.
        wanted: [R], indices into the B*S tokens whose logits are needed; zeros as padding.
        order: the rows in the whole run's logits to which the first rows belong.
    """

    module: ModuleSection
    first: int
    ids: Int64Array
    index: Int64Array
    wanted: Int64Array
    order: Int64Array


class Plan:
    """Divides runs among the modules for slots of one length.

    Args:
        modules: all modules of the target.
        places: the number of positions in a slot.
        slots: the number of slots.
    """

    def __init__(self, modules: Sequence[ModuleSection], places: int, slots: int) -> None:
        fitting = [module for module in modules if module.places == places]
        self._places, self._slots = places, slots
        self._decodes = sorted((m for m in fitting if m.tokens == 1), key=lambda m: m.requests)
        self._decodes = [m for m in self._decodes if m.requests <= slots]
        self._prompts = {m.tokens: m for m in fitting if m.rows == 1}
        self._scores = {m.tokens: m for m in fitting if m.rows == m.tokens and m.requests == 1}

    def parts(self, run: SlotRun) -> Iterator[Part]:
        """Yields the parts of a run. Decode steps are divided by slots; prompts are computed one by one, in chunks."""
        if run.ids.shape[1] == 1:
            yield from self._decode(run)
            return
        for row in range(len(run.ids)):
            yield from self._prompt(run, row)

    def _decode(self, run: SlotRun) -> Iterator[Part]:
        """Yields the parts of a decode run. Rows of padding write to the last position of their slot, which no request
        uses.
        """
        most = self._decodes[-1].requests
        for top in range(0, len(run.ids), most):
            count = min(most, len(run.ids) - top)
            module = next(m for m in self._decodes if m.requests >= count)
            first = max(min(run.first + top, self._slots - module.requests), 0)
            offset = run.first + top - first
            ids = np.zeros((module.requests, 1), np.int64)
            index = np.full(module.requests, self._places - 1, np.int64)
            ids[offset : offset + count] = run.ids[top : top + count]
            index[offset : offset + count] = run.places[top : top + count, 0]
            inside = np.flatnonzero((run.wanted >= top) & (run.wanted < top + count))
            padded = np.zeros(module.rows, np.int64)
            padded[: len(inside)] = run.wanted[inside] - top + offset
            yield Part(module, first, ids, index, padded, inside)

    def _prompt(self, run: SlotRun, row: int) -> Iterator[Part]:
        length = run.ids.shape[1]
        of_row = np.flatnonzero(run.wanted // length == row)
        columns = run.wanted[of_row] % length
        start = 0
        for size, scored in self._chunks(length, int(run.places[row, 0]), columns.tolist()):
            module = (self._scores if scored else self._prompts)[size]
            ids = np.zeros((1, size), np.int64)
            tokens = run.ids[row, start : start + size]
            ids[0, : len(tokens)] = tokens
            inside = np.flatnonzero((columns >= start) & (columns < start + size))
            padded = np.zeros(module.rows, np.int64)
            padded[: len(inside)] = columns[inside] - start
            yield Part(module, run.first + row, ids, run.places[row, start : start + 1], padded, of_row[inside])
            start += size

    def _chunks(self, length: int, place: int, columns: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Yields the size of each chunk of a prompt, and True if several of its tokens need logits.

        The sizes add up to ``length`` or more. ``place`` is the position of the first token in the slot, ``columns``
        has the indices of tokens that need logits.
        """
        done = 0
        while done < length:
            left, room = length - done, self._places - place - done
            size = self._best(self._prompts, left, room)
            scored = sum(done <= c < done + size for c in columns) > 1
            if scored:
                size = self._best(self._scores, left, room)
            yield size, scored
            done += size

    def _best(self, sizes: Sequence[int] | dict[int, ModuleSection], left: int, room: int) -> int:
        """Returns the size of the next chunk: the best for ``left`` remaining tokens among those that fit into ``room``
        positions.
        """
        fitting = sorted(size for size in sizes if size <= room)

        def cost(tokens: int) -> tuple[int, int]:
            """Returns (cost in tokens, size of the first chunk) of the best division of ``tokens`` tokens."""
            above = next((size for size in fitting if size >= tokens), None)
            below = max((size for size in fitting if size < tokens), default=None)
            choices = []
            if above is not None:
                choices.append((above + _OVERHEAD, above))
            if below is not None:
                choices.append((below + _OVERHEAD + cost(tokens - below)[0], below))
            return min(choices)

        if left > 2 * fitting[-1]:
            return fitting[-1]
        return cost(left)[1]
