"""How often drafts are accepted, and what rejected ones may cost: both by the kind of proposal (``Proposal.kind``)."""

from __future__ import annotations

from enginewright.runtime.requests.lookup import FORCED, MODEL

_EXPECTED = {8: 0.8, 4: 0.6, 3: 0.4, 2: 0.25, MODEL: 0.7, FORCED: 1.0}
"""Acceptance rates behind an n-gram of so many tokens, or of a kind, until they are measured."""
_WEIGHT = 4.0
"""The weight of what was expected, in tokens."""
_MEMORY = 100.0
"""Tokens that a rate goes back to."""
_FADED = 0.98
"""What is left of a rate's weight after a proposal that wasn't worth a draft, so that it is tried again some day."""
CREDIT = 1.0
"""Steps' time that drafts of a kind may cost before any was accepted."""
MORE_CREDIT = 0.003
"""And more for each step, so that what was rejected is tried again."""
_MOST_CREDIT = 3.0
"""Accepted drafts earn credit, up to so many steps' time: a long run of them can't pay for many rejected ones."""


class AcceptanceRates:
    """How often a proposed token is accepted, behind accepted ones: first what was expected, then what was seen.

    Args:
        before: of all requests; one request's own begin with them.
    """

    def __init__(self, before: AcceptanceRates | None = None) -> None:
        self._before = before
        self._seen: dict[int, list[float]] = {}  # kind -> accepted tokens, tokens

    def rate(self, kind: int) -> float:
        """Gives the rate of a kind."""
        expected = _EXPECTED[abs(kind)] if self._before is None else self._before.rate(kind)
        accepted, tokens = self._seen.get(kind, (0.0, 0.0))
        return (accepted + _WEIGHT * expected) / (tokens + _WEIGHT)

    def saw(self, kind: int, accepted: int, tokens: int) -> None:
        """Counts so many tokens, of which the last alone may be rejected."""
        seen = self._seen.setdefault(kind, [0.0, 0.0])
        kept = min(1.0, _MEMORY / max(seen[1] + tokens, 1))
        seen[0], seen[1] = (seen[0] + accepted) * kept, (seen[1] + tokens) * kept

    def fade(self, kind: int) -> None:
        """Takes weight from a kind of which a proposal wasn't worth a draft."""
        if (seen := self._seen.get(kind)) is not None:
            seen[0], seen[1] = seen[0] * _FADED, seen[1] * _FADED


class Credit:
    """What drafts may cost, by their kind: in the time of steps without drafts. Accepted ones have earned it."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[float, int]] = {}  # kind -> credit, after so many steps

    def left(self, kind: int, step: int) -> float:
        """Gives what is left in a step, by its number."""
        left, then = self._left.get(kind, (CREDIT, step))
        return left + MORE_CREDIT * (step - then)

    def spend(self, kind: int, cost: float, step: int) -> None:
        """Takes what a draft cost; less than 0 is what it saved."""
        self._left[kind] = min(self.left(kind, step) - cost, _MOST_CREDIT), step
