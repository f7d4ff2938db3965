"""How often drafts are accepted, by their kind, and what they may cost."""

from __future__ import annotations

import pytest

from enginewright.runtime.scheduler.acceptance import CREDIT, MORE_CREDIT, AcceptanceRates, Credit


def test_rates_go_from_what_was_expected_to_what_was_seen() -> None:
    all_requests = AcceptanceRates()
    one, other = AcceptanceRates(all_requests), AcceptanceRates(all_requests)
    assert all_requests.rate(8) == one.rate(-8) == 0.8
    for _ in range(200):
        one.saw(2, 0, 1)
    assert one.rate(2) < 0.02 and other.rate(2) == all_requests.rate(2) == 0.25
    for _ in range(300):
        one.fade(2)
    assert one.rate(2) > 0.2  # and it is tried again
    for _ in range(50):
        all_requests.saw(2, 5, 6)
    assert 0.7 < other.rate(2) < 0.84
    for _ in range(50):
        all_requests.saw(2, 0, 1)
    assert all_requests.rate(2) < 0.6  # the latest count


def test_what_drafts_may_cost_is_earned_by_accepted_ones() -> None:
    credit = Credit()
    assert credit.left(8, 0) == credit.left(8, 500) == CREDIT, "before the first nothing adds up"
    credit.spend(8, 0.9, 500)
    assert credit.left(8, 600) == pytest.approx(CREDIT - 0.9 + 100 * MORE_CREDIT) and credit.left(4, 600) == CREDIT
    for step in range(600, 700):
        credit.spend(8, -0.5, step)
    assert credit.left(8, 699) == 3.0, "a long run pays for a few rejected ones alone"
