"""The choice of options against all there are."""

from __future__ import annotations

import itertools
import random

import pytest

from enginewright.optimizer.search.assign import Assignment, Options, fewest_bytes, least_cost, pareto_curve


def problem(units: int, options: int, seed: int) -> list[Options]:
    """Mostly: fewer bytes cost more."""
    draw = random.Random(seed)
    units_made = []
    for _ in range(units):
        sizes = sorted(draw.sample(range(10, 1000), options))
        costs = sorted((draw.random() ** 3 for _ in range(options)), reverse=True)
        if draw.random() < 0.3:
            draw.shuffle(costs)  # some options are of no use
        units_made.append(Options(tuple(sizes), tuple(costs)))
    return units_made


def everything(units: list[Options]) -> list[tuple[int, float]]:
    """Bytes and cost of every assignment there is."""
    return [
        (
            sum(u.sizes[o] for u, o in zip(units, chosen, strict=True)),
            sum(u.costs[o] for u, o in zip(units, chosen, strict=True)),
        )
        for chosen in itertools.product(*(range(len(u.sizes)) for u in units))
    ]


def check(units: list[Options], found: Assignment) -> None:
    assert found.size == sum(u.sizes[o] for u, o in zip(units, found.chosen, strict=True))
    assert found.cost == pytest.approx(sum(u.costs[o] for u, o in zip(units, found.chosen, strict=True)))


@pytest.mark.parametrize(("units", "options"), [(1, 4), (4, 3), (6, 4)])
@pytest.mark.parametrize("seed", range(5))
def test_no_assignment_is_below_the_curve(units: int, options: int, seed: int) -> None:
    units_made = problem(units, options, seed)
    curve = pareto_curve(units_made)
    for point in curve:
        check(units_made, point)
    assert [p.size for p in curve] == sorted((p.size for p in curve), reverse=True)
    assert [p.cost for p in curve] == sorted(p.cost for p in curve)
    every = everything(units_made)
    assert curve[-1].size == min(size for size, _ in every)
    assert curve[0].cost == pytest.approx(min(cost for _, cost in every))
    for point in curve:  # nothing is both smaller and better
        assert not any(size < point.size and cost < point.cost - 1e-12 for size, cost in every)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("share", [0.05, 0.3, 0.8])
def test_budgets_are_kept_and_nearly_all_used(seed: int, share: float) -> None:
    units_made = problem(6, 4, seed)
    every = everything(units_made)
    least, most = min(c for _, c in every), max(c for _, c in every)
    budget = least + share * (most - least)
    small = fewest_bytes(units_made, budget)
    assert small is not None
    check(units_made, small)
    assert small.cost <= budget
    best = min(size for size, cost in every if cost <= budget)
    whole = max(size for size, _ in every) - min(size for size, _ in every)
    assert small.size - best <= 0.15 * whole  # one unit of six may be a step off

    fewest, largest = min(s for s, _ in every), max(s for s, _ in every)
    room = int(fewest + share * (largest - fewest))
    exact = least_cost(units_made, room)
    assert exact is not None
    check(units_made, exact)
    assert exact.size <= room
    assert exact.cost - min(cost for size, cost in every if size <= room) <= 0.15 * (most - least)


def test_what_the_curve_leaves_is_spent_on_single_changes() -> None:
    """Between two points of the hull lies one that isn't on it."""
    units = [Options((10, 90, 100), (1.0, 0.5, 0.0))]  # 90 is above the line from 10 to 100
    assert [p.size for p in pareto_curve(units)] == [100, 10]
    assignment = fewest_bytes(units, 0.6)
    assert assignment is not None
    assert assignment.size == 90
    assignment = least_cost(units, 95)
    assert assignment is not None
    assert assignment.cost == 0.5


def test_a_budget_that_nothing_meets_has_no_assignment() -> None:
    units = [Options((10, 20), (1.0, 0.5)), Options((5, 6), (0.2, 0.1))]
    assert fewest_bytes(units, 0.59) is None
    assert least_cost(units, 14) is None
    exact, small = fewest_bytes(units, 0.6), least_cost(units, 15)
    assert exact is not None
    assert small is not None
    assert (exact.size, small.size) == (26, 15)


def test_of_equal_options_the_smaller_is_taken() -> None:
    units = [Options((8, 4, 4), (0.0, 0.0, 0.3))]
    assert [p.chosen for p in pareto_curve(units)] == [(1,)]
