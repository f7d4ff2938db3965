"""The acceptance rates of drafts, and the time that rejected drafts may cost, for each kind of proposal."""

from __future__ import annotations

from enginewright.runtime.requests.proposers import ProposalKind

_WEIGHT = 4.0
"""The weight of the expected rate against measured ones, as a number of tokens."""
_MEMORY = 100.0
"""The approximate number of last tokens over which a rate is measured."""
_FADED = 0.98
"""The factor on the weight of a kind's measured rate after a proposal without an expected gain.

So the rate approaches the expected one, and the kind is tried again later.
"""
CREDIT = 1.0
"""The time, in steps, that drafts of a kind may cost before the first one is accepted."""
MORE_CREDIT = 0.003
"""The time, in steps, by which the credit of a kind grows with each step, so that a rejected kind is tried again."""
_MOST_CREDIT = 3.0
"""The most credit of a kind, in steps: a long run of accepted drafts can't pay for many rejected ones."""


class AcceptanceRates:
    """The probability that a proposed token is accepted if the tokens before it were, for each kind of proposal.

    It begins with the expected rate, and then follows the measured one.

    Args:
        before: the rates of all requests, with which those of one request begin; None for the rates of all requests.
    """

    def __init__(self, before: AcceptanceRates | None = None) -> None:
        self._before = before
        self._seen: dict[ProposalKind, list[float]] = {}  # kind -> accepted tokens, tokens

    def rate(self, kind: ProposalKind) -> float:
        """Returns the acceptance rate of the tokens of a kind of proposals, from 0 to 1."""
        expected = kind.expected if self._before is None else self._before.rate(kind)
        accepted, tokens = self._seen.get(kind, (0.0, 0.0))
        return (accepted + _WEIGHT * expected) / (tokens + _WEIGHT)

    def saw(self, kind: ProposalKind, accepted: int, tokens: int) -> None:
        """Counts the tokens of a draft that the model has checked.

        Args:
            kind: the kind of the draft.
            accepted: the number of its accepted tokens.
            tokens: the number of checked tokens: the accepted ones, and the first rejected one if there is one.
        """
        seen = self._seen.setdefault(kind, [0.0, 0.0])
        share = min(1.0, _MEMORY / max(seen[1] + tokens, 1))
        seen[0], seen[1] = (seen[0] + accepted) * share, (seen[1] + tokens) * share

    def fade(self, kind: ProposalKind) -> None:
        """Lowers the weight of a kind's measured rate, after a proposal without an expected gain."""
        if (seen := self._seen.get(kind)) is not None:
            seen[0], seen[1] = seen[0] * _FADED, seen[1] * _FADED


class Credit:
    """The time that drafts of each kind may cost, in steps without drafts. Accepted drafts earn more."""

    def __init__(self) -> None:
        self._left: dict[ProposalKind, tuple[float, int]] = {}  # kind -> credit, and the step in which it was that

    def left(self, kind: ProposalKind, step: int) -> float:
        """Returns the steps of time that drafts of this kind may still cost, in the step with number ``step``."""
        left, then = self._left.get(kind, (CREDIT, step))
        return left + MORE_CREDIT * (step - then)

    def spend(self, kind: ProposalKind, cost: float, step: int) -> None:
        """Subtracts a draft's cost from the credit of its kind.

        Args:
            kind: the kind of the draft.
            cost: the time that it cost, in steps; negative if it saved time.
            step: the number of the step.
        """
        self._left[kind] = min(self.left(kind, step) - cost, _MOST_CREDIT), step
