"""Guesses from a request's own tokens and from past answers, and how often they are right."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.runtime.requests import lookup
from enginewright.runtime.requests.lookup import OWN_GRAMS, PAST_TENANTS, Lookup, PastAnswers, RightTokens


def next_tokens(found: Lookup, most: int) -> list[int]:
    guess = found.next(most)
    return [] if guess is None else list(guess.tokens)


def test_what_followed_before_follows_again() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 9, 2, 3]
    found = Lookup(tokens)
    assert next_tokens(found, 4) == [4, 5, 6, 7]
    assert next_tokens(found, 2) == [4, 5]
    tokens.append(8)
    assert next_tokens(found, 15) == []
    tokens += [6, 7]
    assert next_tokens(found, 4) == [9, 2, 3, 8]


def test_the_longest_and_latest_match_counts() -> None:
    assert next_tokens(Lookup([1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3]), 1) == [50]  # three tokens, and not two later ones
    assert next_tokens(Lookup([2, 3, 50, 9, 2, 3, 60, 8, 2, 3]), 1) == [60]


def test_what_repeats_itself_goes_on_so() -> None:
    assert next_tokens(Lookup([7, 8] * 5), 5) == [7, 8, 7, 8, 7]
    assert next_tokens(Lookup([5, 5, 5]), 3) == [5, 5, 5]


def test_places_are_those_of_a_plain_search() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, 30).tolist()
    found = Lookup(tokens)
    for token in rng.integers(0, 4, 400).tolist():
        tokens.append(token)
        guess, wanted = found.next(1), None
        for count in OWN_GRAMS:
            ends = [e for e in range(count, len(tokens)) if tokens[e - count : e] == tokens[-count:]]
            if ends:
                wanted = ([tokens[ends[-1]]], count)
                break
        assert wanted == (None if guess is None else (guess.tokens, guess.by))


def test_past_answers_are_those_of_the_tenant() -> None:
    past = PastAnswers()
    tokens = list(range(100, 140))
    past.add("a", tokens, 10)
    guess = past.next("a", [0, *range(120, 128)], 4, 0)
    assert guess is not None and (list(guess.tokens), guess.by) == ([128, 129, 130, 131], -8)
    guess = past.next("a", [0, *range(120, 124)], 4, 0)
    assert guess is not None and (list(guess.tokens), guess.by) == ([124, 125, 126, 127], -4)
    guess = past.next("a", tokens[:10], 2, 0)  # the same question
    assert guess is not None and list(guess.tokens) == tokens[10:12]
    assert past.next("a", [0, *range(120, 124)], 4, 4) is None  # its own text has as much
    assert past.next("a", [0, 121, 122, 123], 4, 0) is None
    assert past.next("b", [0, *range(120, 128)], 4, 0) is None
    assert past.next("a", list(range(132, 140)), 4, 0) is None  # nothing follows
    for i in range(PAST_TENANTS):
        past.add(f"other {i}", tokens, 10)
    assert past.next("a", [0, *range(120, 128)], 4, 0) is None
    assert past.next("other 0", [0, *range(120, 128)], 4, 0) is not None


def test_the_oldest_answers_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "PAST_TOKENS", 100)
    past, rng = PastAnswers(), np.random.default_rng(0)
    texts = [rng.integers(0, 50, 30).tolist() for _ in range(50)]
    for number, text in enumerate(texts):
        past.add("", text, 0)
        (answers,) = past._tenants.values()
        assert answers._tokens == sum(map(len, answers._kept.values())) <= 100
        known = {text: past.next("", texts[text][:12], 3, 0) for text in range(number + 1)}
        assert [text for text, guess in known.items() if guess is not None] == list(range(number + 1))[-3:]
        assert all(list(guess.tokens) == texts[text][12:15] for text, guess in known.items() if guess is not None)
        assert len(answers._places) <= 2 * 100
    past.add("", [7] * 400, 0)  # longer than all that is kept
    assert answers._tokens <= 100


def test_shares_go_from_what_was_expected_to_what_was_seen() -> None:
    all_requests = RightTokens()
    one, other = RightTokens(all_requests), RightTokens(all_requests)
    assert all_requests.share(8) == one.share(-8) == 0.8
    for _ in range(200):
        one.saw(2, 0, 1)
    assert one.share(2) < 0.02 and other.share(2) == all_requests.share(2) == 0.25
    for _ in range(300):
        one.forget(2)
    assert one.share(2) > 0.2  # and it is tried again
    for _ in range(50):
        all_requests.saw(2, 5, 6)
    assert 0.7 < other.share(2) < 0.84
    for _ in range(50):
        all_requests.saw(2, 0, 1)
    assert all_requests.share(2) < 0.6  # the latest count
