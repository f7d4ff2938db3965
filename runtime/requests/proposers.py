"""Proposers: sources of tokens that may follow those of a request, which a step of the model verifies.

A proposer can't change a result: ``scheduler.drafts`` keeps the proposed tokens that the model draws itself. A new one
is a class in a file of its own and a row of ``PROPOSERS`` in ``runtime/engine/proposers.py``. The class declares its
name, its kinds of proposals with the rates at which these are expected to be accepted, and what proposing costs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .request import Generation, Request


@dataclass(frozen=True, eq=False, slots=True)
class ProposalKind:
    """A kind of proposals: acceptance and costs are counted for each kind by itself.

    Attributes:
        source: the name of its proposer.
        rank: of a request's proposals that cost nothing, the one with the highest rank is taken, then the first.
        expected: the share of its tokens that are accepted, behind accepted ones, until that is measured.
    """

    source: str
    rank: int
    expected: float


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow those of a request; none is ``NOTHING``. The next token comes first."""

    tokens: Sequence[int]
    kind: ProposalKind


NOTHING = Proposal((), ProposalKind("", 0, 0.0))


class Proposer(ABC):
    """A source of proposals, which cost no time unless it is a ``TimedProposer``.

    Attributes:
        name: the source of its proposals in ``LLM.info`` and in metrics.
        bytes: the memory that it takes of the budget for KV caches.
    """

    name: ClassVar[str]
    bytes: int = 0

    @abstractmethod
    def propose(self, wanted: Sequence[tuple[Generation, int]]) -> list[Proposal]:
        """Returns a proposal for each request, with at most as many tokens as is given with it."""

    def observe(self, request: Generation, draft: Sequence[int], accepted: int) -> None:
        """Learns that the model drew the first ``accepted`` tokens of a draft, which this proposed."""
        return

    def release(self, request: Request) -> None:
        """Frees what it holds for a request, which has ended or comes back later."""
        return

    def forget(self, tenant: str | None) -> None:
        """Forgets what requests of a tenant, or of any, have said."""
        return

    def close(self) -> None:
        """Frees its memory."""
        return


class TimedProposer(Proposer):
    """A proposer that computes. It fails without raising.

    Attributes:
        kind: the kind of all its proposals.
        off: the reason why it proposes nothing any more; None while it does.
    """

    kind: ClassVar[ProposalKind]
    off: str | None = None

    @abstractmethod
    def seconds(self, rows: int) -> float:
        """Returns the estimated seconds to propose one more token for each of ``rows`` requests, together."""

    def behind(self, request: Generation) -> float:
        """Returns the seconds that it needs for a request before it can propose; 0 if it lacks few tokens."""
        return 0.0

    def takes(self, request: Generation) -> bool:
        """Returns False for a request that it can't propose for."""
        return True

    def describe(self) -> dict[str, Any]:
        """Returns what ``LLM.info`` says of it."""
        return {}
