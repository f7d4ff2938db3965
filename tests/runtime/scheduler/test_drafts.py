"""Speculation through ``LLM``: the tokens of plain decoding, in fewer steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import enginewright as ew

LOOPING = [70, 71, 72, 73] * 8
PARAMS = ew.SamplingParams(max_tokens=60, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_tokens_and_log_probabilities_are_those_without(tiny_bundle: Path, temperature: float) -> None:
    params = [replace(PARAMS, temperature=temperature, seed=seed) for seed in range(6)]
    with ew.LLM(tiny_bundle) as plain, ew.LLM(tiny_bundle, speculate="lookup") as ahead:
        wanted = plain.generate([LOOPING] * 6, params)
        for one, result in zip(params, wanted, strict=True):
            assert ahead.generate([LOOPING], one) == [result]
        assert ahead.generate([LOOPING] * 6, params) == wanted  # in company
        found = ahead.info()["speculation"]
        assert found["drafted"] >= found["accepted"] >= (temperature == 0)
        assert found["drafted"] > 0
        assert plain.info()["speculation"] is None
        free = ahead.info()["kv_blocks_free"]
        assert all(count == ahead.engine.pools[name].total_blocks for name, count in free.items())


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


def test_stops_end_within_a_draft(tiny_bundle: Path) -> None:
    with ew.LLM(tiny_bundle) as plain, ew.LLM(tiny_bundle, speculate="lookup") as ahead:
        (free,) = plain.generate([LOOPING], PARAMS)
        for at in (5, 20, 41):
            stopped = replace(PARAMS, stop_token_ids=[free.token_ids[at]])
            wanted = plain.generate([LOOPING], stopped)
            assert ahead.generate([LOOPING], stopped) == wanted
            assert ahead.generate([LOOPING], replace(PARAMS, max_tokens=at)) == plain.generate(
                [LOOPING], replace(PARAMS, max_tokens=at)
            )


def test_no_draft_where_rules_change_with_each_token(tiny_bundle: Path) -> None:
    with ew.LLM(tiny_bundle) as plain, ew.LLM(tiny_bundle, speculate="lookup") as ahead:
        params = replace(PARAMS, frequency_penalty=0.5)
        assert ahead.generate([LOOPING], params) == plain.generate([LOOPING], params)
        assert ahead.info()["speculation"]["drafted"] == 0


def test_what_can_not_be_is_said(tiny_bundle: Path) -> None:
    with pytest.raises(ew.RequestError, match="speculate: 'draft' isn't a way to guess tokens"):
        ew.LLM(tiny_bundle, speculate="draft")
