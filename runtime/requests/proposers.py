"""Proposers: sources of tokens that may follow those of a request, which a step of the model verifies.

A proposer can't change a result: ``scheduler.drafts`` keeps the proposed tokens that the model draws itself. A new one
is a class in a file of its own and a row of ``PROPOSERS`` in ``runtime/engine/proposers.py``. The class declares its
name, its kinds of proposals with the rates at which these are expected to be accepted, and what proposing costs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from ..shared.contracts import FloatArray
from .request import Generation, Request


class ProposalKind(msgspec.Struct, frozen=True, eq=False):
    """A kind of proposals: acceptance and costs are counted for each kind separately.

    Attributes:
        source: the name of the proposer.
        rank: the priority among proposals that cost no time: the one with the highest rank becomes the draft.
        expected: the expected rate at which a token is accepted if the tokens before it were, until it is measured.
    """

    source: str
    rank: int
    expected: float


class Proposal(msgspec.Struct, frozen=True):
    """Tokens that may follow those of a request, the next one first. ``NOTHING`` is a proposal without tokens."""

    tokens: Sequence[int]
    kind: ProposalKind


NOTHING = Proposal((), ProposalKind("", 0, 0.0))


class Proposer(ABC):
    """A source of proposals. Its own time is ignored, unless it is a ``TimedProposer``.

    Attributes:
        name: the proposer's name in ``LLM.info`` and in metrics.
        bytes: the memory that the proposer takes from the budget for KV caches.
        outputs: names of the step outputs that ``observe`` gets (``step_schema.OUTPUTS``), such as "hidden:12". Each
            step with such outputs takes longer, whether it has drafts or not.
    """

    name: ClassVar[str]
    bytes: int = 0
    outputs: tuple[str, ...] = ()

    @abstractmethod
    def propose(self, wanted: Sequence[tuple[Generation, int]]) -> list[Proposal]:
        """Returns a proposal for each request.

        Args:
            wanted: the requests, each with the most tokens to propose.
        """

    def observe(
        self, request: Generation, draft: Sequence[int], accepted: int, outputs: Mapping[str, FloatArray]
    ) -> None:
        """Learns from a step in which a request has drawn tokens.

        It is called for each step if the proposer has ``outputs``, otherwise only for steps with its draft.

        Args:
            request: the request, with its new tokens.
            draft: the tokens that this proposer proposed; empty if it proposed none for the step.
            accepted: the number of those tokens, the first ones, that the model drew too.
            outputs: name of each of ``Proposer.outputs`` -> its rows [n, ...]: at the last known token, and at each
                accepted token of the step's draft, whichever proposer made it.
        """
        return

    def release(self, request: Request) -> None:
        """Frees the memory for a request that has ended, or is preempted and will start again."""
        return

    def forget(self, tenant: str | None) -> None:
        """Forgets the texts of a tenant's requests; of all requests if ``tenant`` is None."""
        return

    def close(self) -> None:
        """Frees the proposer's memory."""
        return


class TimedProposer(Proposer):
    """A proposer whose time matters, and is therefore estimated. It never raises: after an error it proposes
    nothing, and ``off`` says why.

    Attributes:
        kind: the kind of all its proposals.
        off: the reason why it has stopped proposing; None while it still proposes.
    """

    kind: ClassVar[ProposalKind]
    off: str | None = None

    @abstractmethod
    def seconds(self, rows: int) -> float:
        """Returns the estimated seconds to propose one more token for each of ``rows`` requests, together."""

    def behind(self, request: Generation) -> float:
        """Returns the seconds that the proposer needs to process a request's tokens that are new to it; 0 if they are
        few.
        """
        return 0.0

    def takes(self, request: Generation) -> bool:
        """Returns True if the proposer can propose tokens for a request."""
        return True

    def describe(self) -> dict[str, Any]:
        """Returns the proposer's entry of ``LLM.info``."""
        return {}
