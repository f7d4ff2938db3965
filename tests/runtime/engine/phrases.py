"""A proposer of another kind than ours: it reads phrases from a file, and proposes how they end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from enginewright.runtime.requests.proposers import NOTHING, Proposal, ProposalKind, Proposer, TimedProposer
from enginewright.runtime.requests.request import Generation

BEGINNING = 2
"""The tokens of a phrase that have to be the request's last ones."""


class Phrases(Proposer):
    """Proposes the rest of a phrase whose beginning is the end of a request's text.

    Args:
        file: a phrase a line, token ids with spaces between them.
    """

    name = "phrases"
    kind = ProposalKind(name, 16, 0.9)

    def __init__(self, file: Path) -> None:
        phrases = [tuple(map(int, line.split())) for line in file.read_text().splitlines()]
        self._endings = {phrase[:BEGINNING]: phrase[BEGINNING:] for phrase in phrases}
        self.observed = [0, 0]
        self.closed = False

    def propose(self, wanted: Sequence[tuple[Generation, int]]) -> list[Proposal]:
        endings = [self._endings.get(tuple(request.tokens[-BEGINNING:]), ())[:most] for request, most in wanted]
        return [Proposal(ending, self.kind) if ending else NOTHING for ending in endings]

    def observe(self, request: Generation, draft: Sequence[int], accepted: int) -> None:
        assert list(request.tokens[-accepted - 1 : -1]) == list(draft[:accepted]) or request.finished
        self.observed[0] += len(draft)
        self.observed[1] += accepted

    def close(self) -> None:
        self.closed = True


class TimedPhrases(Phrases, TimedProposer):
    """A proposer of phrases that takes time."""

    def seconds(self, rows: int) -> float:
        return 1e-6 * rows
