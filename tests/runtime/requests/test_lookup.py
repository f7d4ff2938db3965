"""Drafts from the request's own tokens, and how their length adapts."""

from __future__ import annotations

import numpy as np

from enginewright.runtime.requests.lookup import FIRST, LONGEST_PAUSE, Lookup


def test_what_followed_before_follows_again() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 9, 2, 3]
    found = Lookup(tokens, 15)
    assert found.next(15) == [4, 5, 6, 7][:FIRST]
    assert found.next(2) == [4, 5]
    tokens.append(8)
    assert found.next(15) == []
    tokens += [6, 7]
    assert found.next(15) == [9, 2, 3, 8][:FIRST]


def test_the_longest_and_latest_match_counts() -> None:
    assert Lookup([1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3], 15).next(1) == [50]  # three tokens, and not two later ones
    assert Lookup([2, 3, 50, 9, 2, 3, 60, 8, 2, 3], 15).next(1) == [60]


def test_what_repeats_itself_goes_on_so() -> None:
    assert Lookup([7, 8] * 5, 15).next(5) == [7, 8, 7, 8][:FIRST]
    assert Lookup([5, 5, 5], 15).next(3) == [5, 5, 5]


def test_a_draft_grows_as_it_is_accepted_and_rests_when_it_is_not() -> None:
    tokens = [7, 8] * 20
    found = Lookup(tokens, 15)
    for length in (FIRST, 2 * FIRST, 15, 15):
        draft = found.next(100)
        assert len(draft) == length
        found.took(length, length)
    found.took(15, 3)
    assert len(found.next(100)) == 4
    pauses = []
    for _ in range(9):
        found.took(4, 0)
        pause = 0
        while not found.next(100):
            pause += 1
        pauses.append(pause)
    assert pauses == [2, 4, 8, 16, 32, *[LONGEST_PAUSE] * 4]
    found.took(2, 2)
    assert found.next(100)


def test_places_are_those_of_a_plain_search() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 6, 30).tolist()
    found = Lookup(tokens, 15)
    for token in rng.integers(0, 6, 400).tolist():
        tokens.append(token)
        draft, wanted = found.next(1), []
        for count in (4, 3, 2):
            ends = [e for e in range(count, len(tokens)) if tokens[e - count : e] == tokens[-count:]]
            if ends:
                wanted = [tokens[ends[-1]]]
                break
        assert draft == wanted
