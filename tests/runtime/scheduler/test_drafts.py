"""Speculation through ``LLM``: the tokens of plain decoding, in fewer steps."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import enginewright as ew
from enginewright.runtime.requests.lookup import CREDIT, MORE_CREDIT, Guess, Lookup
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.scheduler.base import Batch, Chunk
from enginewright.runtime.scheduler.drafts import LEAST_GAIN, Drafts
from enginewright.runtime.scheduler.row_costs import RowCosts
from enginewright.runtime.shared.contracts import ExecutorCaps, StepInput, StepOutput
from enginewright.runtime.shared.step_costs import DRAFT_ROWS

LOOPING = [70, 71, 72, 73] * 8
PARAMS = ew.SamplingParams(max_tokens=60, ignore_eos=True, logprobs=2)


@pytest.fixture
def steps_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a draft pays doesn't hang on what else this machine does."""
    monkeypatch.setattr(RowCosts, "took", lambda *given: None)


@pytest.mark.usefixtures("steps_are_not_timed")
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_tokens_and_log_probabilities_are_those_without(tiny_bundle: Path, temperature: float) -> None:
    params = [replace(PARAMS, temperature=temperature, seed=seed) for seed in range(6)]
    with ew.LLM(tiny_bundle, speculate=None) as plain, ew.LLM(tiny_bundle, speculate="lookup") as ahead:
        wanted = plain.generate([LOOPING] * 6, params)
        for one, result in zip(params, wanted, strict=True):
            assert ahead.generate([LOOPING], one) == [result]
        assert ahead.generate([LOOPING] * 6, params) == wanted  # in company
        assert ahead.generate([LOOPING] * 20, [params[0]] * 20) == [wanted[0]] * 20  # more than there are rows
        found = ahead.info()["speculation"]
        assert found["drafted"] >= found["accepted"] >= (temperature == 0)
        assert found["drafted"] > 0
        assert plain.info()["speculation"] is None
        free = ahead.info()["kv_blocks_free"]
        assert all(count == ahead.engine.pools[name].total_blocks for name, count in free.items())


@pytest.mark.usefixtures("steps_are_not_timed")
def test_a_text_that_repeats_itself_takes_fewer_steps(tiny_bundle: Path) -> None:
    """Only one token is allowed, so every draft is right."""
    params = replace(PARAMS, allowed_token_ids=[9], logprobs=None)
    with ew.LLM(tiny_bundle, speculate="lookup") as llm:
        steps = 0
        step = llm.engine.step

        def counted() -> list[object]:
            nonlocal steps
            steps += 1
            return step()  # type: ignore[return-value]

        llm.engine.step = counted  # type: ignore[method-assign,assignment]
        (result,) = llm.generate([[9] * 8], params)
    assert result.token_ids == (9,) * 60
    assert steps < 12
    assert result.metrics.accepted == result.metrics.drafted > 45


@pytest.mark.usefixtures("steps_are_not_timed")
def test_tokens_that_have_to_come_are_known_before(tiny_bundle: Path) -> None:
    params = replace(PARAMS, allowed_token_ids=[9], temperature=1.0, seed=1)
    prompt = list(range(40, 80))
    with (
        ew.LLM(tiny_bundle, speculate=None) as plain,
        ew.LLM(tiny_bundle, speculate="lookup", prefill_chunk=8) as ahead,
    ):
        (result,) = ahead.generate([prompt], params)
        assert [result] == plain.generate([prompt], params)
        found = ahead.info()["speculation"]["sources"]
    assert result.token_ids == (9,) * 60
    assert found["forced"]["accepted"] == found["forced"]["drafted"] > 50  # from the first token on
    assert found["own_text"] == found["past_answers"] == {"drafted": 0, "accepted": 0}


def test_stops_end_within_a_draft(tiny_bundle: Path) -> None:
    with ew.LLM(tiny_bundle, speculate=None) as plain, ew.LLM(tiny_bundle, speculate="lookup") as ahead:
        (free,) = plain.generate([LOOPING], PARAMS)
        for at in (5, 20, 41):
            stopped = replace(PARAMS, stop_token_ids=[free.token_ids[at]])
            wanted = plain.generate([LOOPING], stopped)
            assert ahead.generate([LOOPING], stopped) == wanted
            assert ahead.generate([LOOPING], replace(PARAMS, max_tokens=at)) == plain.generate(
                [LOOPING], replace(PARAMS, max_tokens=at)
            )


@pytest.mark.usefixtures("steps_are_not_timed")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rules_that_change_with_each_token_see_the_draft_before_it(tiny_bundle: Path, temperature: float) -> None:
    """Only a few tokens may come, so that many guesses are right."""
    few = replace(PARAMS, temperature=temperature, seed=3, allowed_token_ids=[9, 10, 11], stop_token_ids=[11])
    several = [
        replace(few, frequency_penalty=0.2),
        replace(few, presence_penalty=0.5, repetition_penalty=1.2),
        replace(few, min_tokens=30),
        replace(few, allowed_token_ids=[9, 12], logit_bias={9: 1.0}, bad_words=[[9, 9, 9, 12], [12, 9]]),
        few,
    ]
    with ew.LLM(tiny_bundle, speculate=None) as plain, ew.LLM(tiny_bundle, speculate="lookup") as ahead:
        for params in several:
            (wanted,), (found,) = plain.generate([[9, 9, 10] * 4], params), ahead.generate([[9, 9, 10] * 4], params)
            assert found == wanted
        together = [[9, 9, 10] * 4] * len(several)
        assert ahead.generate(together, several) == plain.generate(together, several)
        found = ahead.info()["speculation"]
        assert 0 < found["accepted"] < found["drafted"]


def test_what_can_not_be_is_said(tiny_bundle: Path) -> None:
    with pytest.raises(ew.RequestError, match="speculate: '' isn't a way to guess tokens"):
        ew.LLM(tiny_bundle, speculate="")
    with pytest.raises(ew.BundleError, match="speculate: looking doesn't exist"):
        ew.LLM(tiny_bundle, speculate="looking")


@pytest.mark.usefixtures("steps_are_not_timed")
def test_a_request_may_refuse(tiny_bundle: Path) -> None:
    with ew.LLM(tiny_bundle, speculate="lookup") as llm:
        refused, taken = llm.generate([LOOPING] * 2, [replace(PARAMS, speculate=False), PARAMS])
        assert refused.token_ids == taken.token_ids
        assert refused.metrics.drafted == 0 < taken.metrics.drafted


@pytest.mark.usefixtures("steps_are_not_timed")
def test_an_answer_that_comes_again_is_known(tiny_bundle: Path) -> None:
    """With a temperature, so that it doesn't repeat itself."""
    params = replace(PARAMS, temperature=1.5, seed=3, logprobs=None)
    prompt = list(range(40, 52))
    with ew.LLM(tiny_bundle, speculate="lookup") as llm:
        first, again = (llm.generate([prompt], params)[0] for _ in range(2))
        (other,) = llm.generate([prompt], params, tenant="other")
        found = llm.info()["speculation"]["sources"]["past_answers"]
    assert first.token_ids == again.token_ids == other.token_ids
    assert again.metrics.accepted > 40 > 10 > max(first.metrics.accepted, other.metrics.accepted)
    assert 40 < found["accepted"] <= found["drafted"]


def some_costs(each: float) -> RowCosts:
    """A step of one row takes 1, and each more ``each``."""
    return RowCosts({100: [1 + each * rows for rows in range(DRAFT_ROWS)]})


@pytest.mark.parametrize(("each", "share", "decoding"), list(product((0.0, 0.05, 0.2), (0.1, 0.5, 0.9), (1, 4, 12))))
def test_drafts_are_as_long_as_pays(each: float, share: float, decoding: int) -> None:
    drafts = Drafts(ExecutorCaps(verifies=True))
    drafts.costs = some_costs(each)
    drafts.begin_step([Generation([1, 2], PARAMS) for _ in range(decoding)])
    _, found, drafts._tokens = drafts._best(share, DRAFT_ROWS - decoding, math.inf)
    rates = [
        (decoding + sum(share**i for i in range(1, length + 1))) / (1 + each * (decoding + length - 1))
        for length in range(DRAFT_ROWS - decoding + 1)
    ]
    best = max(range(len(rates)), key=rates.__getitem__)
    assert found == (best if rates[best] > LEAST_GAIN * rates[0] else 0)
    drafts._rows += found
    assert drafts._best(share, DRAFT_ROWS - decoding - found, math.inf)[1] <= DRAFT_ROWS - decoding - found


def test_costs_are_those_that_were_measured() -> None:
    costs = RowCosts()
    assert costs.of(1) == 1 < costs.of(2) < costs.of(16) and not costs.describe()
    for seconds in (*[2.0] * 12, 50.0):  # another program ran once
        costs.took(1, seconds)
    assert costs.of(1) == pytest.approx(2, rel=0.3)
    assert costs.of(16) / costs.of(1) == pytest.approx(1 + 15 * RowCosts._ROW, rel=0.1)
    for i in range(200):
        costs.took(1 + i % 3, 2 + 0.5 * (i % 3))
    assert costs.of(1) == pytest.approx(2, rel=0.1) and costs.of(3) == pytest.approx(3, rel=0.1)
    for i in range(800):  # the machine has become slower
        costs.took(1 + i % 3, 4 + 0.1 * (i % 3))
    assert costs.of(1) == pytest.approx(4, rel=0.05) and costs.of(3) == pytest.approx(4.2, rel=0.1)
    for i in range(100):
        costs.took(1 + i % 4, 4 - 0.5 * (i % 4))
    assert costs.of(16) > 0 and costs.describe()["row_us"] == 0
    for i in range(200):  # two rows cost as much as one, and four as three
        costs.took(1 + i % 4, 2 + i % 4 // 2)
    assert [costs.of(rows) for rows in (1, 2, 3, 4)] == pytest.approx([2, 2, 3, 3], rel=0.1)


@pytest.mark.parametrize(("first", "later"), [(50.0, 1.0), (1.0, 0.6), (1.0, 1.6)])
def test_steps_of_more_rows_follow_those_that_are_seen(first: float, later: float) -> None:
    """The first step of a process is slow, or the machine becomes faster or slower: rows seem neither dear nor free."""
    costs = RowCosts()
    for i in range(200):
        costs.took(8, first if i == 0 else 1.0 if i < 100 else later)
        if i >= 20:
            assert [costs.of(rows) / costs.of(8) for rows in (9, 16)] == pytest.approx([1.05, 1.38], rel=0.08)


def test_costs_begin_with_what_was_measured() -> None:
    """By context; the machine may be slower now than it was then."""
    short, long = [1.0] * 8 + [1.5] * 8, [2.0] * 8 + [4.0] * 8
    costs = RowCosts({1000: long, 200: short, 5000: [1.0]})
    assert [costs.of(rows) for rows in (1, 8, 9, 16)] == [1, 1, 1.5, 1.5] and not costs.describe()
    costs.at(600)
    assert [costs.of(rows) for rows in (8, 9)] == [1.5, 2.75]
    costs.at(9000)
    assert [costs.of(rows) for rows in (8, 9)] == [2, 4]
    for _ in range(40):
        costs.took(1, 3.0)
    assert (costs.of(1), costs.of(16)) == pytest.approx((3, 6), rel=0.05)
    costs.at(0)
    assert (costs.of(1), costs.of(16)) == pytest.approx((1.5, 2.25), rel=0.05)


def test_a_step_may_have_more_rows_than_drafts_fill() -> None:
    """Prompts of which all but one token are in the prefix cache join a step that drafts have filled."""
    drafts, requests = Drafts(ExecutorCaps(verifies=True)), [Generation([1, 2], PARAMS) for _ in range(4)]
    drafts.costs.took(1, 1.0)
    before = [drafts.costs.of(rows) for rows in range(1, DRAFT_ROWS + 1)]
    chunks = (Chunk(requests[0], 1, DRAFT_ROWS, [5] * (DRAFT_ROWS - 1)), *(Chunk(one, 1, 1) for one in requests[1:]))
    ints = np.zeros(DRAFT_ROWS + 3, np.int32)
    step = StepInput(ids=ints, positions=ints, q_start=ints, kv_len=ints, block_tables={}, slots={}, rows=ints)
    drafts.stepped(Batch(chunks, step), 9.0)
    assert [drafts.costs.of(rows) for rows in range(1, DRAFT_ROWS + 1)] == before


@pytest.mark.parametrize("decoding", [1, 4])
def test_what_wrong_drafts_lose_is_bounded(monkeypatch: pytest.MonkeyPatch, decoding: int) -> None:
    """Guesses look like the best ones and are never right; a row costs a fifth of a step, more than is expected."""
    monkeypatch.setattr(Lookup, "next", lambda self, most: Guess([5] * most, 8))
    drafts, requests = (
        Drafts(ExecutorCaps(verifies=True)),
        [Generation([1, 2], replace(PARAMS, logprobs=None)) for _ in range(decoding)],
    )
    for request in requests:
        request.max_tokens = 10_000
    drafts.costs.took(decoding, 1.0)
    lost = 0.0
    tried = 0
    for steps in range(1, 1001):
        drafts.next_step(requests)
        drafts.begin_step(requests)
        chunks = []
        for request in requests:
            request.computed = len(request.tokens) - 1
            draft = drafts.of(request)
            chunks.append(Chunk(request, request.computed, 1 + len(draft), draft))
        rows = sum(chunk.count for chunk in chunks)
        more = 0.2 * (rows - decoding)
        lost, tried = lost + more, tried + (more > 0)
        ints = np.zeros(rows, np.int32)
        step = StepInput(ids=ints, positions=ints, q_start=ints, kv_len=ints, block_tables={}, slots={}, rows=ints)
        drafts.stepped(Batch(tuple(chunks), step), 1.0 + more)
        for chunk in chunks:
            if chunk.draft:
                drafts.verify(chunk, [6] * chunk.count, StepOutput(None), 0)
            else:
                chunk.request.accept(6, None)
        assert lost <= 3 * CREDIT + MORE_CREDIT * steps  # the first ones are tried before their costs are known
    assert tried > 1
