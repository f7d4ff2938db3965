"""Rules of a request's next tokens, and their arrays; what these do to logits is tested in tests/plugins/native."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.requests.logit_rules import PLAIN, LogitRules, RowLists, sampling_batch
from enginewright.runtime.requests.sampling import SamplingParams

PROMPT = [5, 6, 5]


def rules(bad_words: list[list[int]] | None = None, tokens: list[int] | None = None, **params: Any) -> LogitRules:
    logit_rules = LogitRules.from_params(SamplingParams(**params), tokens or PROMPT.copy(), [1, 2], bad_words or [])
    assert logit_rules is not None
    return logit_rules


def test_most_requests_have_none() -> None:
    assert LogitRules.from_params(SamplingParams(temperature=1.0, top_p=0.5, logprobs=3), PROMPT, [1]) is None


def test_penalties_follow_the_tokens() -> None:
    one = rules(repetition_penalty=1.5, frequency_penalty=0.5)
    assert one.changing
    assert sorted(one.prompted) == [5, 6] and not one.counted
    for token in (7, 5, 7, 7):
        one.push(token)
    assert dict(zip(one.counted, one.counts, strict=True)) == {7: 3, 5: 1}  # of the output alone
    assert not rules(presence_penalty=1.0).prompted


def test_ends_are_banned_until_there_are_enough_tokens() -> None:
    tokens = PROMPT.copy()
    one = rules(tokens=tokens, min_tokens=2, logit_bias={2: 3.0, 9: -1.0})
    for length, biases in ((0, {2: -math.inf, 9: -1.0, 1: -math.inf}), (1, None), (2, {2: 3.0, 9: -1.0})):
        tokens[len(PROMPT) :] = [8] * length
        ids, values = one.biases()
        if biases is not None:
            assert dict(zip(ids, values, strict=True)) == biases
    assert one.changing


def test_a_bad_word_ends_nowhere() -> None:
    def banned(tokens: list[int]) -> set[int]:
        ids, values = rules([[4], [6, 5, 3], [5, 8]], tokens).biases()
        assert set(values) == {-math.inf}
        return set(ids)

    assert banned(PROMPT) == {4, 3, 8}
    assert banned([*PROMPT, 9]) == {4}
    assert banned([6]) == {4}
    assert not rules([[4]]).changing and rules([[4, 5]]).changing


def test_rules_behind_a_draft_are_those_of_the_tokens_with_it() -> None:
    draft, words = [6, 5, 6, 3, 6], [[4], [6, 5, 3], [5, 6], [6, 5, 6, 3, 2]]
    options = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "min_tokens": 4}
    tokens = [*PROMPT, 6]
    one = rules(words, PROMPT.copy(), **options)
    one._tokens.append(6)
    one.push(6)
    lists = one.ahead(draft)
    assert lists[0] is one and len(lists) == 6
    for length, behind in enumerate(lists):
        new = rules(words, PROMPT.copy(), **options)
        for token in [6, *draft[:length]]:
            new._tokens.append(token)
            new.push(token)
        assert (behind.prompted, behind.counted, behind.counts) == (new.prompted, new.counted, new.counts)
        assert behind.biases() == new.biases()
    assert one._tokens == tokens and list(one.counts) == [1]  # they are as they were
    still = rules(allowed_token_ids=[3])
    assert still.ahead(draft) == [still] * 6


def test_the_arrays_of_rows_with_and_without_rules() -> None:
    params = [
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(),
        SamplingParams(presence_penalty=0.5, allowed_token_ids=[9, 3, 9]),
        SamplingParams(logit_bias={4: 2.0}),
    ]
    each = [LogitRules.from_params(one, PROMPT.copy()) for one in params]
    assert each[1] is None and each[2] is not None
    each[2].push(3)
    batch = sampling_batch([(one, 0, 0) for one in params], each)
    options = {name: array.tolist() for name, array in batch.options().items()}
    assert options["repetition_penalty"] == [1.5, 1, 1, 1]
    assert options["presence_penalty"] == [0, 0, 0.5, 0]
    # The third row's penalty is 1: what it has seen changes nothing.
    assert options["seen_start"] == [0, 2, 2, 3, 3] and sorted(options["seen"][:2]) == [5, 6]
    assert (options["counted_start"], options["counted"], options["counts"]) == ([0, 0, 0, 1, 1], [3], [1])
    assert (options["allowed_start"], options["allowed"]) == ([0, 0, 0, 2, 2], [3, 9])
    assert (options["biased_start"], options["biased"], options["bias"]) == ([0, 0, 0, 0, 1], [4], [2.0])
    assert not {"frequency_penalty", "typical_p"} & set(options)
    assert all(array.dtype in (np.float32, np.int32, np.uint64) for array in batch.options().values())


def test_the_lists_of_the_next_steps_are_those_of_a_new_batch() -> None:
    params = [
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5),
        SamplingParams(),
        SamplingParams(presence_penalty=0.5, min_tokens=2),
    ]
    tokens = [PROMPT.copy() for _ in params]
    each = [LogitRules.from_params(one, rules_of, [1]) for one, rules_of in zip(params, tokens, strict=True)]
    rows = [(one, 0, 0) for one in params]
    batch = sampling_batch(rows, each)
    lists = RowLists(batch, each)
    for new in ([5, 9, 9, 9], [5, 5, 5, 5], [5, 9, 8, 9], [7, 9, 7, 7]):  # in the third step nothing new comes
        for rules_of, one, token in zip(tokens, each, new, strict=True):
            rules_of.append(token)
            if one is not None:
                one.push(token)
        lists.put(batch)
        options, expected = batch.options(), sampling_batch(rows, each).options()
        assert options.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(options[name], array, err_msg=name)
        assert sorted(set(options["seen"][: options["seen_start"][1]])) == sorted(set(tokens[0]))


def test_what_nobody_has_is_not_there() -> None:
    batch = sampling_batch([PLAIN, PLAIN], [None, None])
    assert set(batch.options()) == {"temperature", "top_k", "top_p", "min_p", "seed", "counter"}
    assert batch.logprobs is None and sampling_batch([PLAIN], (), 8).logprobs == 8


def test_biases_that_end_are_taken_out_of_the_next_batch() -> None:
    tokens = PROMPT.copy()
    one = rules(tokens=tokens, min_tokens=1)
    batch = sampling_batch([PLAIN], [one])
    assert batch.biased is not None and sorted(batch.biased) == [1, 2]
    tokens.append(8)
    RowLists(batch, [one])
    assert batch.biased is None and batch.bias is None and batch.biased_start is None


@pytest.mark.parametrize("words", [1, 1000])
def test_many_bad_words_cost_little(words: int) -> None:
    one = rules([[3 + i, 4 + i] for i in range(words)], [*PROMPT, 3])
    assert len(one.biases()[0]) == 1
