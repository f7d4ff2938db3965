"""The result of scheduling: a batch, and the step input that describes it to an executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from enginewright.runtime.requests.logit_rules import PLAIN, LogitRules, Row, sampling_batch
from enginewright.runtime.requests.request import Generation, Request
from enginewright.runtime.requests.structured import Guided

from ..shared.contracts import CacheGroup, Int32Array, StepInput
from ..shared.step_schema import provided


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens start..start+count-1 of a request, in one step. Never changed; not frozen, as many are made each step.

    Attributes:
        draft: tokens behind the last known one that may follow; the last of ``count``.
        samples: whether the step gives the request a new token: the chunk has its last known token.
        scores: whether the request wants the logits, or hidden states, of all the chunk's tokens.
        rows: how many rows of logits the request wants: those of the last ``rows`` tokens of the chunk.
    """

    request: Request
    start: int
    count: int
    draft: Sequence[int] = ()
    samples: bool = field(init=False)
    scores: bool = field(init=False)
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        # Kept, because the request's tokens grow when the step is committed.
        self.scores = self.request.wants_prompt
        known = self.start + self.count - len(self.draft)
        self.samples = known == len(self.request.tokens) and not self.request.scores
        self.rows = self.count if self.scores else int(self.samples) + len(self.draft)


@dataclass(frozen=True)
class Batch:
    """The chunks of a step, in the order of their tokens.

    Attributes:
        scheduled, began: when scheduling it began, and when it was done, by the scheduler's clock.
        alone: whether no other step was in flight.
    """

    chunks: tuple[Chunk, ...]
    step: StepInput
    scheduled: float = 0.0
    began: float = 0.0
    alone: bool = True


def step_input(chunks: Sequence[Chunk], groups: Mapping[str, CacheGroup], ports: Sequence[str] = ()) -> StepInput:
    """Makes the arrays of a step; see ``contracts.StepInput``. Array operations, as this is Python between two steps.

    ``ports``: those that the program takes besides the ones of every step, as in ``ExecutorCaps.ports``.
    """
    starts, counts, rows = np.array([(c.start, c.count, c.rows) for c in chunks], np.int32).T  # [B] each
    ends, row_ends = np.cumsum(counts, dtype=np.int32), np.cumsum(rows, dtype=np.int32)  # [B] each
    sampled: list[Row] = []
    most: list[int] = []  # top logprobs that are wanted
    rules: list[LogitRules | None] = []
    guided: list[Guided] = []
    searched: list[int] = []  # rows of beam searches with a grammar
    scored: dict[int, Sequence[int]] = {}  # row -> the tokens that follow in its prompt, and in those behind it
    for c in chunks:
        request, plain = c.request, c.rows - c.samples - len(c.draft)  # of a prompt's tokens, which are known
        if plain and isinstance(request, Generation):
            scored[len(sampled)] = request.tokens[c.start + 1 : c.start + 1 + plain]
            most.append(request.params.prompt_logprobs or 0)
        sampled += [PLAIN] * plain
        rules += [None] * plain
        if c.samples and isinstance(request, Generation):
            if request.rules is not None and request.rules.grammar is not None:
                guided.append(Guided(request.rules.grammar, len(sampled), c.draft))
                searched += [len(sampled)] * (request.search is not None)
            for ahead in range(1 + len(c.draft)):
                sampled.append((request.params, request.seed, request.output_length + ahead))
            rules += [None] * (1 + len(c.draft)) if request.rules is None else request.rules.ahead(c.draft)
            if request.search is not None:
                most.append(request.search.looked_at)
    sampling = sampling_batch(sampled, rules, max(most, default=None), scored, guided) if sampled else None
    if searched:
        assert sampling is not None
        sampling.top_allowed = np.zeros(len(sampled), np.int32)
        sampling.top_allowed[searched] = 1
    tokens = chain.from_iterable((*c.request.tokens[c.start : c.start + c.count], *c.draft) for c in chunks)
    return StepInput.packed(
        ids=np.fromiter(tokens, np.int32, int(ends[-1])),
        counts=counts,
        kv_len=starts + counts,
        tables={name: _block_table(chunks, name) for name in groups},
        groups=groups.values(),
        rows=np.arange(len(sampled), dtype=np.int32) + np.repeat(ends - row_ends, rows),
        more=provided(ports, chunks),
        sampling=sampling,
        outputs=tuple(sorted({name for c in chunks if c.request.scores for name in c.request.outputs})),
    )


def _block_table(chunks: Sequence[Chunk], group: str) -> Int32Array:
    tables = [c.request.tables[group] for c in chunks]
    padded = np.full((len(chunks), max(map(len, tables))), -1, np.int32)  # [B, blocks]
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
