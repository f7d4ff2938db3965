"""The acceptance of drafts by their kind, and the cost that they may have."""

from __future__ import annotations

import pytest

from enginewright.runtime.requests.lookup import OWN_KINDS, PAST_KINDS
from enginewright.runtime.scheduler.acceptance import CREDIT, MORE_CREDIT, AcceptanceRates, Credit

TWO, FOUR, EIGHT = (OWN_KINDS[count] for count in (2, 4, 8))


def test_rates_go_from_what_was_expected_to_what_was_seen() -> None:
    all_requests = AcceptanceRates()
    one, other = AcceptanceRates(all_requests), AcceptanceRates(all_requests)
    assert all_requests.rate(EIGHT) == one.rate(PAST_KINDS[8]) == 0.8
    for _ in range(200):
        one.saw(TWO, 0, 1)
    assert one.rate(TWO) < 0.02 and other.rate(TWO) == all_requests.rate(TWO) == 0.25
    for _ in range(300):
        one.fade(TWO)
    assert one.rate(TWO) > 0.2  # and it is tried again
    for _ in range(50):
        all_requests.saw(TWO, 5, 6)
    assert 0.7 < other.rate(TWO) < 0.84
    for _ in range(50):
        all_requests.saw(TWO, 0, 1)
    assert all_requests.rate(TWO) < 0.6  # the latest count


def test_what_drafts_may_cost_is_earned_by_accepted_ones() -> None:
    credit = Credit()
    assert credit.left(EIGHT, 0) == credit.left(EIGHT, 500) == CREDIT, "before the first nothing adds up"
    credit.spend(EIGHT, 0.9, 500)
    assert (
        credit.left(EIGHT, 600) == pytest.approx(CREDIT - 0.9 + 100 * MORE_CREDIT) and credit.left(FOUR, 600) == CREDIT
    )
    for step in range(600, 700):
        credit.spend(EIGHT, -0.5, step)
    assert credit.left(EIGHT, 699) == 3.0, "a long run pays for a few rejected ones alone"
