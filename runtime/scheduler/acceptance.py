"""Rates of accepted drafts, and the cost that rejected ones may have: both by the kind of proposal."""

from __future__ import annotations

from enginewright.runtime.requests.proposers import ProposalKind

_WEIGHT = 4.0
"""The weight of what was expected, in tokens."""
_MEMORY = 100.0
"""Tokens that a rate goes back to."""
_FADED = 0.98
"""The share of a rate's weight that remains after a proposal that wasn't worth a draft: it is tried again some day."""
CREDIT = 1.0
"""Steps' time that drafts of a kind may cost before any was accepted."""
MORE_CREDIT = 0.003
"""And more for each step, so that what was rejected is tried again."""
_MOST_CREDIT = 3.0
"""Accepted drafts earn credit, up to so many steps' time: a long run of them can't pay for many rejected ones."""


class AcceptanceRates:
    """The rate of accepted proposed tokens after accepted ones: at first the expected, then the observed.

    Args:
        before: of all requests; one request's own begin with them.
    """

    def __init__(self, before: AcceptanceRates | None = None) -> None:
        self._before = before
        self._seen: dict[ProposalKind, list[float]] = {}  # kind -> accepted tokens, tokens

    def rate(self, kind: ProposalKind) -> float:
        """Gives the rate of a kind."""
        expected = kind.expected if self._before is None else self._before.rate(kind)
        accepted, tokens = self._seen.get(kind, (0.0, 0.0))
        return (accepted + _WEIGHT * expected) / (tokens + _WEIGHT)

    def saw(self, kind: ProposalKind, accepted: int, tokens: int) -> None:
        """Counts so many tokens, of which the last alone may be rejected."""
        seen = self._seen.setdefault(kind, [0.0, 0.0])
        share = min(1.0, _MEMORY / max(seen[1] + tokens, 1))
        seen[0], seen[1] = (seen[0] + accepted) * share, (seen[1] + tokens) * share

    def fade(self, kind: ProposalKind) -> None:
        """Takes weight from a kind of which a proposal wasn't worth a draft."""
        if (seen := self._seen.get(kind)) is not None:
            seen[0], seen[1] = seen[0] * _FADED, seen[1] * _FADED


class Credit:
    """The cost that drafts may have, by their kind, in times of a step without drafts. Accepted drafts earn it."""

    def __init__(self) -> None:
        self._left: dict[ProposalKind, tuple[float, int]] = {}  # kind -> credit, after so many steps

    def left(self, kind: ProposalKind, step: int) -> float:
        """Gives what is left in a step, by its number."""
        left, then = self._left.get(kind, (CREDIT, step))
        return left + MORE_CREDIT * (step - then)

    def spend(self, kind: ProposalKind, cost: float, step: int) -> None:
        """Takes what a draft cost; less than 0 is what it saved."""
        self._left[kind] = min(self.left(kind, step) - cost, _MOST_CREDIT), step
