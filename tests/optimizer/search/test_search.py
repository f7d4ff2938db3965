"""The loop that searches share: what costs more together than alone is corrected for, and no budget is overdrawn."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from enginewright.optimizer.search.assign import Assignment
from enginewright.optimizer.search.search import (
    MARGIN,
    NEAR_ENOUGH,
    ROUNDS,
    SHOWN,
    Tried,
    smallest_within,
    some_of,
    try_within,
)

STEPS = 1000
"""The steps of a made-up scale: choice n takes STEPS - n bytes and is predicted to cost n / STEPS nats."""


def choose(most: float) -> Assignment:
    n = min(STEPS, int(most * STEPS + 1e-9))
    return Assignment((n,), STEPS - n, n / STEPS)


def measured(real: Callable[[float], float]) -> Callable[[Assignment], Tried]:
    """Measures on two kinds of tokens, of which one costs half."""
    return lambda a: Tried(a, {"text": real(a.cost) / 2, "random": real(a.cost)})


@pytest.mark.parametrize(("budget", "factor"), [(0.1, 1.0), (0.1, 2.5), (0.3, 0.4), (0.05, 7.0)])
@pytest.mark.parametrize("power", [1.0, 1.3])
def test_most_of_the_budget_is_used_and_no_more(budget: float, factor: float, power: float) -> None:
    tried = try_within(budget, choose, measured(lambda cost: factor * cost**power))
    best = smallest_within(tried, budget)
    assert best is not None and len(tried) <= ROUNDS
    assert 0.7 * NEAR_ENOUGH * MARGIN * budget < best.kl <= MARGIN * budget
    assert len({t.choice.chosen for t in tried}) == len(tried)  # nothing is measured twice


def test_what_shapes_have_spent_is_not_spent_again() -> None:
    budget, spent = 0.2, 0.08
    tried = try_within(budget, choose, measured(lambda cost: spent + 3 * cost), spent=spent)
    assert tried[0].choice.cost == pytest.approx(MARGIN * budget - spent, abs=1 / STEPS)
    best = smallest_within(tried, budget)
    assert best is not None and NEAR_ENOUGH * MARGIN * budget <= best.kl <= MARGIN * budget
    # With nothing left, the cheapest choice is all that is tried.
    assert [t.choice.cost for t in try_within(0.05, choose, measured(lambda cost: spent + cost), spent=spent)] == [0.0]


def test_a_margin_counts_more_than_size_and_a_budget_more_than_both() -> None:
    def tried(n: int, kl: float) -> Tried:
        return Tried(Assignment((n,), n, 0.0), {"text": kl})

    with_margin, without, over = tried(30, 0.089), tried(20, 0.095), tried(10, 0.11)
    assert smallest_within([with_margin, tried(40, 0.01), without, over], 0.1) == with_margin
    assert smallest_within([without, over], 0.1) == without
    assert smallest_within([over], 0.1) is None


def test_what_costs_nothing_is_no_division_by_nothing() -> None:
    tried = try_within(0.1, lambda most: Assignment((0,), 5, 0.0), lambda a: Tried(a, {"text": 0.0}))
    assert [t.kl for t in tried] == [0.0]


@pytest.mark.parametrize("points", [1, 5, SHOWN + 30])
def test_a_long_curve_is_thinned_between_its_ends(points: int) -> None:
    curve = [choose(i / STEPS) for i in range(points)]
    shown = some_of(curve)
    assert len(shown) == min(points, SHOWN) and (shown[0], shown[-1]) == (curve[0], curve[-1])
    assert shown == sorted(shown, key=curve.index)
