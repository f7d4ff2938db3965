"""A proposer of another kind than ours: it reads phrases from a file, and proposes how they end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from enginewright.runtime.requests.proposers import NOTHING, Proposal, ProposalKind, Proposer, TimedProposer
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.shared.contracts import FloatArray

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

    def observe(
        self, request: Generation, draft: Sequence[int], accepted: int, outputs: Mapping[str, FloatArray]
    ) -> None:
        assert not outputs, "it declares none"
        assert list(request.tokens[-accepted - 1 : -1]) == list(draft[:accepted]) or request.finished
        self.observed[0] += len(draft)
        self.observed[1] += accepted

    def close(self) -> None:
        self.closed = True


class TimedPhrases(Phrases, TimedProposer):
    """A proposer of phrases that takes time."""

    def seconds(self, rows: int) -> float:
        return 1e-6 * rows


class LikelyTokens(Proposer):
    """A draft head without weights: it proposes the most probable token of the last step's outputs, again and again.

    Attributes:
        rows: a request -> its rows of outputs so far, of all steps: output -> [n, ...] each.
        drafts: the drafts that were observed, with the number of accepted tokens of each.
    """

    name = "likely"
    kind = ProposalKind(name, 16, 0.9)

    def __init__(self, *outputs: str) -> None:
        self.outputs = outputs
        self.rows: dict[Generation, list[Mapping[str, FloatArray]]] = {}
        self.drafts: list[tuple[Sequence[int], int]] = []

    def propose(self, wanted: Sequence[tuple[Generation, int]]) -> list[Proposal]:
        likely = [int(self.rows[request][-1]["logits"][-1].argmax()) for request, _ in wanted]
        return [Proposal((token,) * min(most, 2), self.kind) for token, (_, most) in zip(likely, wanted, strict=True)]

    def observe(
        self, request: Generation, draft: Sequence[int], accepted: int, outputs: Mapping[str, FloatArray]
    ) -> None:
        self.rows.setdefault(request, []).append({name: rows.copy() for name, rows in outputs.items()})
        if draft:
            self.drafts.append((draft, accepted))
