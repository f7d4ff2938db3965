"""Speculation through ``LLM``: the tokens of plain decoding, in fewer steps."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import enginewright as ew
from enginewright.runtime.requests.lookup import (
    FORCED,
    OWN_KINDS,
    PAST_KINDS,
    ForcedTokens,
    NgramLookup,
    OwnText,
    PastAnswers,
)
from enginewright.runtime.requests.proposers import NOTHING, Proposal
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.scheduler.acceptance import CREDIT, MORE_CREDIT
from enginewright.runtime.scheduler.base import Batch, Chunk
from enginewright.runtime.scheduler.drafts import LEAST_GAIN, Drafts, NoDrafts, _Step, drafts_for
from enginewright.runtime.scheduler.step_times import DecodeTimes
from enginewright.runtime.shared.contracts import DRAFT_ROWS, ExecutorCaps, StepInput, StepOutput

LOOPING = [70, 71, 72, 73] * 8
PARAMS = ew.SamplingParams(max_tokens=60, ignore_eos=True, logprobs=2)


@pytest.fixture
def steps_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the choice of drafts independent of other work on this machine."""
    monkeypatch.setattr(DecodeTimes, "took", lambda *given: None)


@pytest.mark.usefixtures("steps_are_not_timed")
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_tokens_and_log_probabilities_are_those_without(tiny_bundle: Path, temperature: float) -> None:
    params = [replace(PARAMS, temperature=temperature, seed=seed) for seed in range(6)]
    with ew.LLM(tiny_bundle, speculate=None) as plain, ew.LLM(tiny_bundle, speculate="lookup") as ahead:
        expected = plain.generate([LOOPING] * 6, params)
        for one, result in zip(params, expected, strict=True):
            assert ahead.generate([LOOPING], one) == [result]
        assert ahead.generate([LOOPING] * 6, params) == expected  # in company
        assert ahead.generate([LOOPING] * 20, [params[0]] * 20) == [expected[0]] * 20  # more than there are rows
        speculation = ahead.info()["speculation"]
        assert speculation["drafted"] >= speculation["accepted"] >= (temperature == 0)
        assert speculation["drafted"] > 0
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
        sources = ahead.info()["speculation"]["sources"]
    assert result.token_ids == (9,) * 60
    assert sources["forced"]["accepted"] == sources["forced"]["drafted"] > 50  # from the first token on
    assert sources["own_text"] == sources["past_answers"] == {"drafted": 0, "accepted": 0}


def test_stops_end_within_a_draft(tiny_bundle: Path) -> None:
    with ew.LLM(tiny_bundle, speculate=None) as plain, ew.LLM(tiny_bundle, speculate="lookup") as ahead:
        (free,) = plain.generate([LOOPING], PARAMS)
        for at in (5, 20, 41):
            stopped = replace(PARAMS, stop_token_ids=[free.token_ids[at]])
            expected = plain.generate([LOOPING], stopped)
            assert ahead.generate([LOOPING], stopped) == expected
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
            (expected,), (speculation,) = (
                plain.generate([[9, 9, 10] * 4], params),
                ahead.generate([[9, 9, 10] * 4], params),
            )
            assert speculation == expected
        together = [[9, 9, 10] * 4] * len(several)
        assert ahead.generate(together, several) == plain.generate(together, several)
        speculation = ahead.info()["speculation"]
        assert 0 < speculation["accepted"] < speculation["drafted"]


def test_what_can_not_be_is_said(tiny_bundle: Path) -> None:
    with pytest.raises(ew.RequestError, match="speculate: '' isn't a way to guess tokens"):
        ew.LLM(tiny_bundle, speculate="")
    with pytest.raises(ew.BundleError, match="speculate: looking doesn't exist"):
        ew.LLM(tiny_bundle, speculate="looking")


@pytest.mark.usefixtures("steps_are_not_timed")
def test_a_request_may_refuse(tiny_bundle: Path) -> None:
    with ew.LLM(tiny_bundle, speculate="lookup") as llm:
        refused, accepted = llm.generate([LOOPING] * 2, [replace(PARAMS, speculate=False), PARAMS])
        assert refused.token_ids == accepted.token_ids
        assert refused.metrics.drafted == 0 < accepted.metrics.drafted


@pytest.mark.usefixtures("steps_are_not_timed")
def test_an_answer_that_comes_again_is_known(tiny_bundle: Path) -> None:
    """With a temperature, so that it doesn't repeat itself."""
    params = replace(PARAMS, temperature=1.5, seed=3, logprobs=None)
    prompt = list(range(40, 52))
    with ew.LLM(tiny_bundle, speculate="lookup") as llm:
        first, again = (llm.generate([prompt], params)[0] for _ in range(2))
        (other,) = llm.generate([prompt], params, tenant="other")
        answers = llm.info()["speculation"]["sources"]["past_answers"]
    assert first.token_ids == again.token_ids == other.token_ids
    assert again.metrics.accepted > 40 > 10 > max(first.metrics.accepted, other.metrics.accepted)
    assert 40 < answers["accepted"] <= answers["drafted"]


@pytest.mark.parametrize(("each", "rate", "decoding"), list(product((0.0, 0.05, 0.2), (0.1, 0.5, 0.9), (1, 4, 12))))
def test_drafts_are_as_long_as_pays(each: float, rate: float, decoding: int) -> None:
    """A step of one row takes 1, and each more ``each``."""
    times = DecodeTimes({100: [1 + each * rows for rows in range(DRAFT_ROWS)]})
    step = _Step(times, decoding, times.seconds(decoding), rows=decoding, tokens=decoding)
    speed, tokens, step.tokens = step.best([rate], DRAFT_ROWS - decoding, math.inf)
    speeds = [
        (decoding + sum(rate**i for i in range(1, length + 1))) / (1 + each * (decoding + length - 1))
        for length in range(DRAFT_ROWS - decoding + 1)
    ]
    best = max(range(len(speeds)), key=speeds.__getitem__)
    assert tokens == (best if speeds[best] > LEAST_GAIN * speeds[0] else 0)
    assert speed == pytest.approx(speeds[tokens] if tokens else LEAST_GAIN * speeds[0])
    step.rows += tokens
    assert step.best([rate], DRAFT_ROWS - decoding - tokens, math.inf).length <= DRAFT_ROWS - decoding - tokens


def test_drafts_of_several_requests_are_planned_together() -> None:
    """They cost their rows, and what each token more takes for all of them."""
    step = _Step(DecodeTimes({100: [1.0] * DRAFT_ROWS}), 4, 1.0, rows=4, tokens=4)
    best = step.best([0.9, 0.9, 0.5], 4, math.inf, each=0.1)
    tokens = [4 + sum(0.9**i + 0.9**i + 0.5**i for i in range(1, length + 1)) for length in range(5)]
    speeds = [of / (1 + 0.1 * length) for length, of in enumerate(tokens)]
    assert best == pytest.approx((max(speeds), speeds.index(max(speeds)), tokens[speeds.index(max(speeds))]))
    assert step.best([0.9, 0.9, 0.5], 4, 0.25, each=0.1).length == 2, "no more than may be lost"


def drafts_of_lookups() -> Drafts:
    return Drafts(ExecutorCaps(verifies=True), DecodeTimes(), [ForcedTokens(), OwnText(), PastAnswers()])


def test_the_proposal_behind_the_most_equal_tokens_counts() -> None:
    """If the numbers are equal, the request's own text determines the next tokens."""
    drafts = drafts_of_lookups()
    answer = Generation([*range(100, 108), 50], PARAMS)
    answer.tokens += [51, 52]
    answer.finish("stop")
    drafts.release(answer)
    free, forced = PARAMS, replace(PARAMS, allowed_token_ids=[9])
    texts = [[1, 2], [7, *range(104, 108)], [*range(104, 108), 9, *range(104, 108)], [*range(101, 108), 50]]
    proposals = drafts._looked_up([(Generation(text, params), 1) for text in texts for params in (free, forced)])
    assert [proposal.kind for proposal in proposals[::2]] == [NOTHING.kind, PAST_KINDS[4], OWN_KINDS[4], PAST_KINDS[8]]
    assert [list(proposal.tokens) for proposal in proposals[::2]] == [[], [50], [9], [51]]
    assert [(list(proposal.tokens), proposal.kind) for proposal in proposals[1::2]] == [([9], FORCED)] * 4


def test_nothing_is_drafted_where_nothing_can_be_verified() -> None:
    caps, times = ExecutorCaps(verifies=False), DecodeTimes()
    assert type(drafts_for(None, caps, times, ())) is NoDrafts
    assert type(drafts_for(False, ExecutorCaps(verifies=True), times, ())) is NoDrafts
    assert isinstance(drafts_for(None, ExecutorCaps(verifies=True), times, ()), Drafts)
    with pytest.raises(ew.RequestError, match="speculate: this target doesn't promise"):
        drafts_for(True, caps, times, ())


def test_a_step_may_have_more_rows_than_drafts_fill() -> None:
    """Prompts of which all but one token are in the prefix cache join a step that drafts have filled."""
    drafts = drafts_of_lookups()
    requests = [Generation([1, 2], PARAMS) for _ in range(4)]
    drafts.times.took(1, 1.0)
    before = [drafts.times.seconds(rows) for rows in range(1, DRAFT_ROWS + 1)]
    drafts.begin(requests, ())
    chunks = (Chunk(requests[0], 1, DRAFT_ROWS, [5] * (DRAFT_ROWS - 1)), *(Chunk(one, 1, 1) for one in requests[1:]))
    ints = np.zeros(DRAFT_ROWS + 3, np.int32)
    step = StepInput(ids=ints, positions=ints, q_start=ints, kv_len=ints, block_table={}, slots={}, rows=ints)
    drafts.after_step(Batch(chunks, step), 9.0)
    assert [drafts.times.seconds(rows) for rows in range(1, DRAFT_ROWS + 1)] == before


@pytest.mark.parametrize("decoding", [1, 4])
def test_what_wrong_drafts_lose_is_bounded(monkeypatch: pytest.MonkeyPatch, decoding: int) -> None:
    """Guesses look like the best ones and are never right; a row costs a fifth of a step, more than is expected."""
    monkeypatch.setattr(NgramLookup, "next", lambda self, most: Proposal([5] * most, OWN_KINDS[8]))
    drafts, requests = (
        drafts_of_lookups(),
        [Generation([1, 2], replace(PARAMS, logprobs=None)) for _ in range(decoding)],
    )
    for request in requests:
        request.max_tokens = 10_000
    drafts.times.took(decoding, 1.0)
    lost = 0.0
    tried = 0
    for steps in range(1, 1001):
        ahead = drafts.begin(requests, ())
        chunks = []
        for request in requests:
            request.computed = len(request.tokens) - 1
            draft = drafts.draft(request) if ahead else ()
            chunks.append(Chunk(request, request.computed, 1 + len(draft), draft))
        rows = sum(chunk.count for chunk in chunks)
        more = 0.2 * (rows - decoding)
        lost, tried = lost + more, tried + (more > 0)
        ints = np.zeros(rows, np.int32)
        step = StepInput(ids=ints, positions=ints, q_start=ints, kv_len=ints, block_table={}, slots={}, rows=ints)
        drafts.after_step(Batch(tuple(chunks), step), 1.0 + more)
        for chunk in chunks:
            if chunk.draft:
                drafts.verify(chunk, [6] * chunk.count, StepOutput(None), 0)
            else:
                chunk.request.accept(6, None)
        assert lost <= 3 * CREDIT + MORE_CREDIT * steps  # the first ones are tried before their costs are known
    assert tried > 1
