"""A proposer that the engine doesn't know is a file and a row: its drafts are verified, counted, and change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import enginewright as ew
from enginewright.runtime.engine.proposers import PROPOSERS
from enginewright.runtime.scheduler.step_times import DecodeTimes
from enginewright.runtime.shared.errors import RequestError
from tests.runtime.engine.phrases import LikelyTokens, Phrases, TimedPhrases

PROMPTS = [[9, 40, 22, 7, 80 + i] for i in range(4)]
PARAMS = ew.SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("toy", [Phrases, TimedPhrases])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_those_without_it(
    toy: type[Phrases], temperature: float, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecodeTimes, "took", lambda *given: None)  # if a draft pays doesn't depend on this machine
    params = [replace(PARAMS, temperature=temperature, seed=i) for i in range(4)]
    with ew.LLM(tiny_bundle, speculate=None) as plain:
        expected = plain.generate(PROMPTS, params)
    # Phrases of five tokens of which the answers have the first four, and of four tokens of which they have all.
    answers = [[*prompt, *result.token_ids] for prompt, result in zip(PROMPTS, expected, strict=True)]
    phrases = [text[at : at + 4] + [3] * (at % 2) for text in answers for at in range(3, 40, 7)]
    (tmp_path / "phrases.txt").write_text("\n".join(" ".join(map(str, phrase)) for phrase in phrases))
    monkeypatch.setitem(PROPOSERS, toy.name, lambda setup: toy(tmp_path / "phrases.txt"))

    with ew.LLM(tiny_bundle, speculate="lookup") as llm:
        (proposer,) = (one for one in llm.engine.proposers if isinstance(one, Phrases))
        assert llm.generate(PROMPTS, params) == expected
        assert [llm.generate([prompt], one)[0] for prompt, one in zip(PROMPTS, params, strict=True)] == expected
        speculation = llm.info()["speculation"]
    counts = speculation["sources"]["phrases"]
    assert 0 < counts["accepted"] < counts["drafted"]
    assert proposer.observed == [counts["drafted"], counts["accepted"]] and proposer.closed
    assert ("draft_phrases" in speculation) == (toy is TimedPhrases)


def test_one_with_outputs_gets_those_of_every_step(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecodeTimes, "took", lambda *given: None)
    with ew.LLM(tiny_bundle, speculate=None) as plain:
        expected = plain.generate(PROMPTS, PARAMS)
        texts = [[*prompt, *result.token_ids[:-1]] for prompt, result in zip(PROMPTS, expected, strict=True)]
        states = [plain.hidden_states(text, [1])[0][len(PROMPTS[0]) - 1 :] for text in texts]
    toy = LikelyTokens("logits", "hidden:1")
    monkeypatch.setitem(PROPOSERS, toy.name, lambda setup: toy)
    with ew.LLM(tiny_bundle, speculate="lookup") as llm:
        assert llm.generate(PROMPTS, PARAMS) == expected
        assert not llm.engine.scheduler.counters.helper_errors
        counts = llm.info()["speculation"]["sources"]["likely"]
    assert 0 < counts["drafted"] == sum(len(draft) for draft, _ in toy.drafts)
    assert counts["accepted"] == sum(accepted for _, accepted in toy.drafts)
    for steps, result, expected_states in zip(toy.rows.values(), expected, states, strict=True):
        logits, hidden = (np.concatenate([rows[name] for rows in steps]) for name in toy.outputs)
        assert logits.argmax(1).tolist() == list(result.token_ids)
        np.testing.assert_array_equal(hidden, expected_states)


def test_an_output_that_a_bundle_lacks_is_refused(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROPOSERS, LikelyTokens.name, lambda setup: LikelyTokens("hidden:99"))
    with pytest.raises(RequestError, match="speculate: proposer 'likely' needs the output 'hidden:99'"):
        ew.LLM(tiny_bundle, speculate="lookup")


def test_a_row_opens_nothing_where_nothing_is_proposed(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROPOSERS, "phrases", lambda setup: Phrases(tiny_bundle / "nowhere.txt"))
    with ew.LLM(tiny_bundle, speculate=None) as llm:
        assert llm.engine.proposers == ()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ew.LLM(tiny_bundle, speculate="lookup")


def test_the_kv_cache_gets_the_memory_that_proposers_leave(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "none.txt").write_text("1 2 3")
    memory, free = 1 << 26, []
    for taken_bytes in (0, memory - (1 << 20)):
        toy = Phrases(tmp_path / "none.txt")
        toy.bytes = taken_bytes
        monkeypatch.setitem(PROPOSERS, "phrases", lambda setup, toy=toy: toy)
        with ew.LLM(tiny_bundle, speculate="lookup", memory=memory) as llm:
            free.append(sum(llm.info()["kv_blocks_free"].values()))
    assert 0 < free[1] < free[0]
