"""Beam search: which sequences of a request go on, and which of the finished ones are its answers.

As in transformers 5 (``generate`` with ``num_beams``, ``length_penalty``, ``early_stopping``), whose order of decisions
this follows. A search has no more sequences than beams, each a ``Request`` of its own for the scheduler. All are
one token further before it chooses anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .outputs import TokenLogprobs
from .sampling import SamplingParams

if TYPE_CHECKING:
    from enginewright.runtime.text.output_text import OutputText

    from .request import Request


@dataclass(frozen=True)
class Answer:
    """A finished sequence: its score, new tokens, their log-probabilities, and whether an end token ended it."""

    score: float
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    stopped: bool


@dataclass(frozen=True)
class Branch:
    """A sequence that goes on: ``parent`` with one token more, of which the sum of log-probabilities is ``total``."""

    parent: Request
    token: TokenLogprobs
    total: float


@dataclass(eq=False)
class BeamSearch:
    """Of one request.

    Attributes:
        root: the request that the caller waits for, one of ``members``.
        new_text: makes what turns an answer's tokens into text; gives None if nobody wants text.
        members: its sequences, while they run.
        answers: the finished ones, best first; so many at most as there are beams.
    """

    params: SamplingParams
    end_tokens: frozenset[int]
    max_tokens: int
    vocab_size: int
    new_text: Callable[[], OutputText | None] = lambda: None
    members: list[Request] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    finished: bool = False

    def __post_init__(self) -> None:
        self._totals: dict[Request, float] = {}
        self._found: dict[Request, Sequence[tuple[int, float]]] = {}  # of members that are one token further

    @property
    def root(self) -> Request:
        return self.members[0]

    @property
    def candidates(self) -> int:
        """Most probable continuations that it chooses from: enough to go on if many of them are ends."""
        return max(2, 1 + len(self.end_tokens)) * self.params.num_beams

    @property
    def looked_at(self) -> int:
        """Most probable tokens that it wants to know of each sequence: as many, or all that there are. Where all of
        them are fewer than the beams, there are fewer sequences at first."""
        return min(self.candidates, self.vocab_size)

    @property
    def ready(self) -> bool:
        """Whether all sequences are one token further."""
        return not self.finished and all(member in self._found for member in self.members)

    def take(self, member: Request, top: Sequence[tuple[int, float]]) -> None:
        """The most probable next tokens of a sequence, best first."""
        self._found[member] = top

    def choose(self) -> list[Branch]:
        """What goes on, best first; nothing, and ``finished``, where the search is over."""
        params, beams = self.params, self.params.num_beams
        found = [
            (self._totals.get(member, 0.0) + logprob, member, token, logprob)
            for member in self.members
            for token, logprob in self._found[member]
        ]
        # Sorting keeps the order of equals: the first sequence's first.
        best = sorted(found, key=lambda one: -one[0])[: self.candidates]
        length = self.root.output_length + 1
        full = params.early_stopping is True and len(self.answers) == beams
        going = []
        for place, (total, member, token, logprob) in enumerate(best):
            ends = token in self.end_tokens
            if not ends and length < self.max_tokens:
                going.append(Branch(member, self._entry(member, token, logprob), total))
            elif place < beams and not full:
                entry = self._entry(member, token, logprob)
                tokens = (*member.tokens[member.prompt_length :], token)
                score = total / length**params.length_penalty
                self.answers.append(Answer(score, tokens, (*member.token_logprobs, entry), ends))
        self.answers = sorted(self.answers, key=lambda answer: -answer.score)[:beams]
        going = going[:beams]
        self._found.clear()
        self.finished = not going or (params.early_stopping is True and len(self.answers) == beams)
        self.finished = self.finished or not self._may_improve(going[0].total, length)
        return [] if self.finished else going

    def forget(self) -> None:
        """What was taken is lost: the sequences are computed anew."""
        self._found.clear()

    def advanced(self, member: Request, branch: Branch) -> None:
        """``member``, which has the tokens of the branch's parent, goes on as that branch."""
        self._totals[member] = branch.total
        member.extend(branch.token)

    def _may_improve(self, total: float, length: int) -> bool:
        """Whether a sequence that goes on may become better than an answer; see ``SamplingParams.early_stopping``."""
        params = self.params
        if len(self.answers) < params.num_beams:
            return True
        longest = params.early_stopping == "never" and params.length_penalty > 0
        best = float(total / (self.max_tokens if longest else length) ** params.length_penalty)
        return best > self.answers[-1].score

    def _entry(self, member: Request, token: int, logprob: float) -> TokenLogprobs:
        return TokenLogprobs(token, logprob, tuple(self._found[member][: self.params.logprobs or 0]))
