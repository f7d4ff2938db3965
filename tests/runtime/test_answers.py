"""Several answers of a prompt, and what else ``SamplingParams`` can ask for, through ``LLM``."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import enginewright as ew
from enginewright.runtime.requests.sampling import sample_seed

PROMPT = [70, 71, 72, 73] * 10


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[ew.LLM]:
    with ew.LLM(tiny_bundle) as opened:
        yield opened


def test_each_answer_is_that_of_a_request_with_its_seed(llm: ew.LLM) -> None:
    params = ew.SamplingParams(temperature=1.2, seed=9, n=4, max_tokens=12, ignore_eos=True, logprobs=1)
    (result,) = llm.generate([PROMPT], params)
    answers = [result, *result.others]
    assert len({answer.token_ids for answer in answers}) == 4
    for i, answer in enumerate(answers):
        (alone,) = llm.generate([PROMPT], replace(params, n=1, seed=sample_seed(9, i)))
        assert alone == replace(answer, others=())
    assert [output.index for output in result.outputs] == [0, 1, 2, 3]
    assert [output.token_ids for output in result.outputs] == [answer.token_ids for answer in answers]


def test_the_best_are_those_of_the_greatest_probability_a_token(llm: ew.LLM) -> None:
    params = ew.SamplingParams(temperature=1.5, n=6, max_tokens=8, ignore_eos=True, logprobs=0)
    (every,) = llm.generate([PROMPT], params)
    by_mean = sorted([every, *every.others], key=lambda one: -(one.cumulative_logprob or 0) / len(one.token_ids))
    (best,) = llm.generate([PROMPT], replace(params, n=2, best_of=6, logprobs=None))
    assert [best.token_ids, best.others[0].token_ids] == [one.token_ids for one in by_mean[:2]]
    assert len(best.others) == 1 and best.logprobs is None


def test_streams_name_the_answer(llm: ew.LLM) -> None:
    params = ew.SamplingParams(temperature=1.2, seed=9, n=3, max_tokens=6, ignore_eos=True)
    (result,) = llm.generate([PROMPT], params)
    expected = [answer.token_ids for answer in (result, *result.others)]

    async def collected() -> list[ew.StreamPiece]:
        return [piece async for piece in llm.astream(PROMPT, params)]

    for pieces in (list(llm.stream(PROMPT, params)), asyncio.run(collected())):
        streamed = [tuple(t for piece in pieces if piece.index == i for t in piece.token_ids) for i in range(3)]
        assert streamed == expected
    for wrong in ({"num_beams": 2}, {"best_of": 2, "temperature": 1.0}):
        with pytest.raises(ew.RequestError, match="so they can't be streamed"):
            llm.stream(PROMPT, ew.SamplingParams(**wrong))  # type: ignore[arg-type]


def test_a_stream_that_is_closed_aborts_every_answer(llm: ew.LLM) -> None:
    pieces = llm.stream(PROMPT, ew.SamplingParams(temperature=1.0, n=3, max_tokens=200, ignore_eos=True))
    next(pieces)
    pieces.close()
    llm.generate([[5]], ew.SamplingParams(max_tokens=1))
    assert not llm.engine.scheduler.running and not llm.engine.scheduler.waiting


@pytest.mark.parametrize("chunk", [7, 512])
def test_the_prompts_log_probabilities_are_of_its_logits(tiny_bundle: Path, chunk: int) -> None:
    with ew.LLM(tiny_bundle, prefill_chunk=chunk) as llm:
        logits = llm.logits(PROMPT).astype(np.float64)
        llm.generate([PROMPT], ew.SamplingParams(max_tokens=1))  # a prefix that isn't taken
        (plain,) = llm.generate([PROMPT], ew.SamplingParams(max_tokens=4))
        (result,) = llm.generate([PROMPT], ew.SamplingParams(max_tokens=4, prompt_logprobs=2))
    assert result.token_ids == plain.token_ids and plain.prompt_logprobs is None
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == len(PROMPT)
    assert result.prompt_logprobs[0] is None
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    for at, entry in enumerate(result.prompt_logprobs[1:], 1):
        assert entry is not None and entry.token_id == PROMPT[at]
        # The sampler's: weights are 32-bit floats, and so is what comes out.
        assert entry.logprob == pytest.approx(logprobs[at - 1, PROMPT[at]], abs=4e-6)
        best = np.argsort(-logprobs[at - 1], kind="stable")[:2]
        assert [token for token, _ in entry.top] == best.tolist()


@pytest.mark.parametrize("tokens", [1, 33])
def test_a_prompts_last_token_may_come_by_itself(tiny_bundle: Path, tokens: int) -> None:
    """Behind it the prompt has none whose log-probability is wanted."""
    prompt = PROMPT[:tokens]
    with ew.LLM(tiny_bundle, prefill_chunk=32) as llm:
        (result,) = llm.generate([prompt], ew.SamplingParams(max_tokens=4, prompt_logprobs=2))
        (plain,) = llm.generate([prompt], ew.SamplingParams(max_tokens=4))
    assert result.token_ids == plain.token_ids
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_has_the_same_log_probability_drawn_and_in_a_prompt(llm: ew.LLM, temperature: float) -> None:
    params = ew.SamplingParams(temperature=temperature, max_tokens=40, logprobs=3, ignore_eos=True)
    (drawn,) = llm.generate([PROMPT], params)
    again = ew.SamplingParams(max_tokens=1, prompt_logprobs=3)
    (scored,) = llm.generate([[*PROMPT, *drawn.token_ids]], again)
    assert scored.prompt_logprobs is not None and scored.prompt_logprobs[len(PROMPT) :] == drawn.logprobs


def test_a_beam_search_that_looks_at_the_whole_vocabulary(llm: ew.LLM) -> None:
    """With so many end tokens it wants to know more tokens of each sequence than there are."""
    size = llm.model.vocab_size
    ends = list(range(0, size, 2))
    params = ew.SamplingParams(num_beams=4, n=4, max_tokens=1, stop_token_ids=ends, ignore_eos=True)
    assert (1 + len(ends)) * 4 > size
    (best,) = llm.generate([PROMPT], params)
    row = llm.logits(PROMPT)[-1].astype(np.float64)
    row -= np.log(np.exp(row).sum())
    beams = [best, *best.others]
    assert [one.token_ids[0] for one in beams] == np.argsort(-row, kind="stable")[:4].tolist()
    (longer,) = llm.generate([PROMPT], replace(params, max_tokens=6))
    every = [longer, *longer.others]
    assert len({one.token_ids for one in every}) == 4
    for one in every:
        logits = llm.logits([*PROMPT, *one.token_ids])[len(PROMPT) - 1 : -1].astype(np.float64)
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        total = sum(row[token] for row, token in zip(logits, one.token_ids, strict=True))
        assert one.score == pytest.approx(total / len(one.token_ids), abs=1e-4)  # sums of 32-bit floats
        assert not set(one.token_ids[:-1]) & set(ends)
    few = ew.SamplingParams(num_beams=4, n=2, max_tokens=3, stop_token_ids=list(range(2, size)), ignore_eos=True)
    assert llm.generate([PROMPT], few)[0].finish_reason in ("stop", "length")  # two tokens go on: fewer than beams


def test_rules_are_kept(llm: ew.LLM) -> None:
    free = llm.generate([PROMPT], ew.SamplingParams(max_tokens=20, ignore_eos=True))[0].token_ids

    def tokens(**params: Any) -> tuple[int, ...]:
        return llm.generate([PROMPT], ew.SamplingParams(**{"max_tokens": 20, "ignore_eos": True} | params))[0].token_ids

    assert free[0] not in tokens(logit_bias={free[0]: -math.inf})
    assert set(tokens(logit_bias={9: 1e4})) == {9}
    assert set(tokens(allowed_token_ids=[4, 8, 15])) <= {4, 8, 15}
    pair = list(free[1:3])
    assert not any(list(pair) == list(two) for two in zip(*[iter(tokens(bad_words=[pair]))] * 1, strict=False))
    banned = tokens(bad_words=[pair])
    assert banned[:2] == free[:2] and (banned[2] != free[2])
    assert len(set(tokens(presence_penalty=1e3))) == 20
    assert len(set(tokens(frequency_penalty=1e3))) == 20
    assert tokens(temperature=3.0, typical_p=0.5) != tokens(temperature=3.0)
    last = free[2]
    assert len(tokens(stop_token_ids=[last])) <= 3
    assert len(tokens(stop_token_ids=[last], min_tokens=10)) >= 11


def test_words_are_banned_as_they_are_tokenized(smollm2_bundle: Path) -> None:
    with ew.LLM(smollm2_bundle) as llm:
        (free,) = llm.generate("The capital of France is", ew.SamplingParams(max_tokens=8))
        assert "Paris" in free.text
        (banned,) = llm.generate("The capital of France is", ew.SamplingParams(max_tokens=8, bad_words=["Paris"]))
        assert "Paris" not in banned.text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"logit_bias": {300: 1.0}}, "logit_bias: token 300 is outside the vocabulary"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids: token 300"),
        ({"bad_words": [[3, 300]]}, "bad_words: token 300"),
        ({"allowed_token_ids": [5], "bad_words": [[5]]}, "allowed_token_ids: logit_bias, bad_words or min_tokens ban"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "allowed_token_ids: "),
    ],
)
def test_what_can_not_be_is_said_at_once(wrong: dict[str, Any], said: str, llm: ew.LLM) -> None:
    with pytest.raises(ew.RequestError, match=said):
        llm.generate([PROMPT], ew.SamplingParams(**wrong))


def test_a_request_whose_every_token_is_banned_ends_and_the_others_go_on(llm: ew.LLM) -> None:
    """Its bad words leave nothing at its second token."""
    wrong = ew.SamplingParams(allowed_token_ids=[5], bad_words=[[5, 5]], max_tokens=8, ignore_eos=True)
    good = ew.SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = llm.generate([PROMPT, PROMPT], [wrong, good], raise_errors=False)
    assert first.finish_reason == "error" and first.token_ids == (5,)
    assert first.error is not None and "no token may come as new token 1" in first.error.message
    assert second == llm.generate([PROMPT], good)[0]
