"""Proposals from a request's own tokens and from past answers."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.runtime.requests import lookup
from enginewright.runtime.requests.lookup import OWN_KINDS, PAST_KINDS, PAST_TENANTS, NgramLookup, PastAnswers
from enginewright.runtime.requests.proposers import NOTHING, ProposalKind


def next_tokens(found: NgramLookup, most: int) -> list[int]:
    return list(found.next(most).tokens)


def test_what_followed_before_follows_again() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 9, 2, 3]
    ngrams = NgramLookup(tokens)
    assert next_tokens(ngrams, 4) == [4, 5, 6, 7]
    assert next_tokens(ngrams, 2) == [4, 5]
    tokens.append(8)
    assert next_tokens(ngrams, 15) == []
    tokens += [6, 7]
    assert next_tokens(ngrams, 4) == [9, 2, 3, 8]


def test_the_longest_and_latest_match_counts() -> None:
    # Three tokens, and not two later ones.
    assert next_tokens(NgramLookup([1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3]), 1) == [50]
    assert next_tokens(NgramLookup([2, 3, 50, 9, 2, 3, 60, 8, 2, 3]), 1) == [60]


def test_what_repeats_itself_goes_on_so() -> None:
    assert next_tokens(NgramLookup([7, 8] * 5), 5) == [7, 8, 7, 8, 7]
    assert next_tokens(NgramLookup([5, 5, 5]), 3) == [5, 5, 5]


def test_places_are_those_of_a_plain_search() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, 30).tolist()
    ngrams = NgramLookup(tokens)
    for token in rng.integers(0, 4, 400).tolist():
        tokens.append(token)
        expected: tuple[list[int], ProposalKind] = ([], NOTHING.kind)
        for count in OWN_KINDS:
            ends = [e for e in range(count, len(tokens)) if tokens[e - count : e] == tokens[-count:]]
            if ends:
                expected = ([tokens[ends[-1]]], OWN_KINDS[count])
                break
        proposal = ngrams.next(1)
        assert (list(proposal.tokens), proposal.kind) == expected


def test_past_answers_are_those_of_the_tenant() -> None:
    past = PastAnswers()
    tokens = list(range(100, 140))
    past.add("a", tokens, 10)
    proposal = past.next("a", [0, *range(120, 128)], 4)
    assert (list(proposal.tokens), proposal.kind) == ([128, 129, 130, 131], PAST_KINDS[8])
    proposal = past.next("a", [0, *range(120, 124)], 4)
    assert (list(proposal.tokens), proposal.kind) == ([124, 125, 126, 127], PAST_KINDS[4])
    assert list(past.next("a", tokens[:10], 2).tokens) == tokens[10:12]  # the same question
    assert past.next("a", [0, 121, 122, 123], 4) == NOTHING
    assert past.next("b", [0, *range(120, 128)], 4) == NOTHING
    assert past.next("a", list(range(132, 140)), 4) == NOTHING  # nothing follows
    for i in range(PAST_TENANTS):
        past.add(f"other {i}", tokens, 10)
    assert past.next("a", [0, *range(120, 128)], 4) == NOTHING
    assert past.next("other 0", [0, *range(120, 128)], 4) != NOTHING


def test_the_oldest_answers_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "PAST_TOKENS", 100)
    past, rng = PastAnswers(), np.random.default_rng(0)
    texts = [rng.integers(0, 50, 30).tolist() for _ in range(50)]
    for number, text in enumerate(texts):
        past.add("", text, 0)
        (answers,) = past._tenants.values()
        assert answers._tokens == sum(map(len, answers._kept.values())) <= 100
        known = {text: list(past.next("", texts[text][:12], 3).tokens) for text in range(number + 1)}
        assert [text for text, known_answer in known.items() if known_answer] == list(range(number + 1))[-3:]
        assert all(known_answer == texts[text][12:15] for text, known_answer in known.items() if known_answer)
        assert len(answers._places) <= 2 * 100
    past.add("", [7] * 400, 0)  # longer than all that is kept
    assert answers._tokens <= 100
