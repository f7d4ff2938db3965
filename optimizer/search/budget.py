"""What the searches under a KL budget have in common: options are chosen by adding up, measured, and chosen again.

What single changes cost is taken to add up (assign.py), and what they cost together is less or more than that.
So a choice is measured as it will be exported, and the budget of the sum is corrected by what came out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from enginewright.plugins.shared.errors import RecipeError, VerificationError

from .assign import Assignment

MARGIN = 0.9
"""Of a KL budget, that is aimed at: the verification of an export looks at other tokens of the same kinds."""

NEAR_ENOUGH = 0.85
"""Of what is aimed at: with as much of it used, another measurement would gain little."""

ROUNDS = 5
"""Most choices that are measured."""

SHORT_OF = 0.97
"""Of where a straight line says that the aim is: the next choice should rather be within the budget."""

SHOWN = 48
"""Most points of a curve that are reported."""

_TINY = 1e-12
"""Nats: of what costs less, no line can be drawn."""


class NothingWithinError(VerificationError):
    """No choice that was found is within the budget."""


class NothingToChooseError(RecipeError):
    """The model has nothing of what the recipe would have searched."""


@dataclass(frozen=True)
class Tried:
    """A choice, and its KL by the kind of tokens that it was measured on, of which the worst counts."""

    choice: Assignment
    measured: dict[str, float]

    @property
    def kl(self) -> float:
        """Nats a token, on the worst kind."""
        return max(self.measured.values())


def try_within(
    max_kl: float,
    choose: Callable[[float], Assignment],
    measure: Callable[[Assignment], dict[str, float]],
    *,
    spent: float = 0.0,
) -> list[Tried]:
    """Chooses and measures until most of the budget is used and the margin is kept, or ROUNDS times.

    Args:
        max_kl: the budget, in nats a token.
        choose: the best whose predicted costs come to at most so much, or what is nearest to that.
        measure: KL by the kind of tokens.
        spent: of the budget, with nothing chosen.

    Returns what was measured, in order, each choice once.
    """
    aim = MARGIN * max_kl
    target = max(aim - spent, 0.0)
    seen: dict[tuple[int, ...], Tried] = {}
    for _ in range(ROUNDS):
        choice = choose(target)
        if choice.chosen in seen:
            break
        seen[choice.chosen] = tried = Tried(choice, measure(choice))
        if NEAR_ENOUGH * aim <= tried.kl <= aim:
            break
        target = SHORT_OF * max(aim - spent, 0.0) * max(choice.cost, _TINY) / max(tried.kl - spent, _TINY)
    return list(seen.values())


def smallest_within(tried: Sequence[Tried], max_kl: float) -> Tried | None:
    """The smallest that keeps the margin; else the smallest within the budget; None if none is."""
    within = [t for t in tried if t.kl <= MARGIN * max_kl] or [t for t in tried if t.kl <= max_kl]
    return min(within, key=lambda t: t.choice.size, default=None)


def some_of(curve: Sequence[Assignment]) -> list[Assignment]:
    """Points of a curve, evenly spread and with both ends, as many as are reported."""
    count = min(SHOWN, len(curve))
    return [curve[i * (len(curve) - 1) // max(count - 1, 1)] for i in range(count)]
