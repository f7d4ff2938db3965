"""The result of scheduling: a batch, and the step input that describes it to an executor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from enginewright.runtime.requests.logit_rules import PLAIN, LogitRules, Row, sampling_batch
from enginewright.runtime.requests.request import Generation, Request
from enginewright.runtime.requests.structured import Guided

from ..shared.contracts import CacheGroup, Int32Array, SamplingBatch, StepInput
from ..shared.step_schema import provided


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens start..start+count-1 of a request in one step. Treat it as immutable; it isn't frozen for speed.

    Attributes:
        request: the request.
        start: the position of the chunk's first token.
        count: the number of its tokens, including the draft's.
        draft: the guessed tokens at the chunk's end, after the last known one.
        known: the number of the request's tokens up to the draft.
        samples: True if the chunk has the last known token, so that the step draws a new one.
        scores: True if the chunk is a part of a prompt whose outputs the request needs.
        rows: the number of tokens at the chunk's end whose outputs are needed.
    """

    request: Request
    start: int
    count: int
    draft: Sequence[int] = ()
    known: int = field(init=False)
    samples: bool = field(init=False)
    scores: bool = field(init=False)
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        # Set here, because the request's tokens grow when the step is committed.
        self.scores = self.request.wants_prompt
        drafted = len(self.draft)
        self.known = self.start + self.count - drafted
        self.samples = self.known == len(self.request.tokens) and not self.request.scores
        if self.scores:
            self.rows = self.count if self.request.token_rows else 0
        else:
            self.rows = self.samples + drafted


@dataclass(slots=True, eq=False)
class Batch:
    """The chunks of a step, in the order of their tokens. Treat it as immutable, like a chunk.

    Attributes:
        chunks: the chunks.
        step: the chunks' arrays.
        scheduled: the time at which the scheduling of the step began, by the scheduler's clock.
        began: the time at which the scheduling was done.
        alone: True if no other step was in flight.
    """

    chunks: tuple[Chunk, ...]
    step: StepInput
    scheduled: float = 0.0
    began: float = 0.0
    alone: bool = True


class _SampledRows:
    """The rows of a step's logits, and their sampling parameters. Rows of known prompt tokens are included, and not
    sampled.

    Attributes:
        rows: the parameters of each row so far.
        rules: the rules of each row's request at that row.
        tops: the numbers of top log-probabilities that some rows need beyond their parameters.
        guided: rows whose tokens a grammar limits.
        searched: rows of beam searches with a grammar.
        draws: True if tokens may be drawn; requests that are computed whole have no logits.
        scored: row -> the tokens that follow it and the next rows, whose log-probabilities are needed.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.rules: list[LogitRules | None] = []
        self.tops: list[int] = []
        self.guided: list[Guided] = []
        self.searched: list[int] = []
        self.draws = False
        self.scored: dict[int, Sequence[int]] = {}

    def add(self, chunk: Chunk) -> None:
        """Adds the rows of a chunk."""
        request, known = chunk.request, chunk.rows - chunk.samples - len(chunk.draft)
        self.draws = self.draws or not request.whole
        if known and isinstance(request, Generation):
            self.scored[len(self.rows)] = request.tokens[chunk.start + 1 : chunk.start + 1 + known]
            self.tops.append(request.params.prompt_logprobs or 0)
        self.rows += [PLAIN] * known
        self.rules += [None] * known
        if chunk.samples and isinstance(request, Generation):
            self._add_drawn(request, chunk.draft)

    def _add_drawn(self, request: Generation, draft: Sequence[int]) -> None:
        """Adds the row of a request's last token, and those of its draft."""
        rules, search = request.rules, request.search
        if rules is not None and rules.grammar is not None:
            self.guided.append(Guided(rules.grammar, len(self.rows), draft))
            self.searched += [len(self.rows)] * (search is not None)
        first = request.output_length
        self.rows += [(request.params, request.seed, first + at) for at in range(1 + len(draft))]
        self.rules += [None] * (1 + len(draft)) if rules is None else rules.ahead(draft)
        if search is not None:
            self.tops.append(search.looked_at)

    def sampling(self) -> SamplingBatch | None:
        """Makes the sampling state of all rows; None if nothing is drawn."""
        if not self.rows or not self.draws:
            return None
        batch = sampling_batch(self.rows, self.rules, max(self.tops, default=None), self.scored, self.guided)
        if self.searched:
            batch.top_allowed = np.zeros(len(self.rows), np.int32)
            batch.top_allowed[self.searched] = 1
        return batch


def step_input(
    chunks: Sequence[Chunk],
    groups: Mapping[str, CacheGroup],
    ports: Sequence[str] = (),
    outputs: Collection[str] = (),
) -> StepInput:
    """Makes the arrays of a step (``contracts.StepInput``). It uses array operations, because the executor waits for
    them.

    Args:
        chunks: the chunks of the step, in the order of their tokens.
        groups: the cache groups by name.
        ports: the program's input arrays besides those of every step, as in ``ExecutorCaps.ports``.
        outputs: names of the outputs to compute besides those of the requests.
    """
    starts, counts, rows = np.array([(c.start, c.count, c.rows) for c in chunks], np.int32).T  # [B] each
    ends = counts.cumsum(dtype=np.int32)  # [B]
    sampled = _SampledRows()
    for chunk in chunks:
        sampled.add(chunk)
    outputs_at = np.arange(len(sampled.rows), dtype=np.int32)  # [R]
    if sampled.rows:
        outputs_at += (ends - rows.cumsum(dtype=np.int32)).repeat(rows)
    tokens = chain.from_iterable((*c.request.tokens[c.start : c.start + c.count], *c.draft) for c in chunks)
    return StepInput.packed(
        ids=np.fromiter(tokens, np.int32, int(ends[-1])),
        counts=counts,
        kv_len=starts + counts,
        tables={name: _block_table(chunks, name) for name in groups},
        groups=groups.values(),
        rows=outputs_at,
        more=provided(ports, chunks),
        sampling=sampled.sampling(),
        outputs=tuple(sorted({*outputs, *(name for c in chunks if c.request.scores for name in c.request.outputs)})),
    )


def _block_table(chunks: Sequence[Chunk], group: str) -> Int32Array:
    tables = [c.request.tables[group] for c in chunks]
    padded = np.full((len(chunks), max(map(len, tables))), -1, np.int32)  # [B, blocks]
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
