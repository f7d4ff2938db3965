"""Beam searches give transformers' answers and scores: three families, prompts that run together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import enginewright as ew
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes

from .tiny_configs import tiny_family

PROMPTS = [np.random.default_rng(n).integers(3, 250, n).tolist() for n in (3, 17, 40, 9, 31, 64)]
Served = tuple[PreTrainedModel, ew.LLM]
CASES = [
    {"num_beams": 2, "n": 2},
    {"num_beams": 4, "n": 3, "length_penalty": 0.0, "early_stopping": True},
    {"num_beams": 4, "n": 4, "length_penalty": 2.0, "early_stopping": "never"},
    {"num_beams": 3, "n": 1, "length_penalty": -1.0},
    {"num_beams": 5, "n": 5, "length_penalty": 1.0, "early_stopping": True},
]


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3_moe"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with distributions that are neither flat nor sharp, so that beams part; and its bundle, opened."""
    model = tiny_family(request.param).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.3 if request.param == "gemma2" else 3)  # whose embedding it is
    model.generation_config.eos_token_id = None
    new = [model.generate(torch.tensor([p]), do_sample=False, max_new_tokens=12)[0, len(p) :] for p in PROMPTS[:3]]
    # Tokens that do come, some of them late.
    model.generation_config.eos_token_id = sorted({int(one[at]) for one, at in zip(new, (4, 8, 11), strict=True)})
    path = tmp_path_factory.mktemp("beams") / "model.bundle"
    ew.export(model, path, recipe="f32", targets=["cpu"])
    with ew.LLM(path) as llm:
        yield model, llm


@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_and_scores_are_those_of_transformers(case: dict[str, Any], served: Served) -> None:
    model, llm = served
    ends = model.generation_config.eos_token_id
    params = ew.SamplingParams(max_tokens=24, stop_token_ids=ends, ignore_eos=True, **case)
    reasons = set()
    for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=24,
                num_beams=case["num_beams"],
                num_return_sequences=case["n"],
                length_penalty=case.get("length_penalty", 1.0),
                early_stopping=case.get("early_stopping", False),
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        answers = [result, *result.others]
        assert len(answers) == case["n"]
        for answer, ids, score in zip(answers, expected.sequences, expected.sequences_scores, strict=True):
            new = ids[len(prompt) :].tolist()
            assert list(answer.token_ids) == new[: len(answer.token_ids)]
            assert set(new[len(answer.token_ids) :]) <= {0, ends[0]}  # transformers fills answers up
            assert answer.score == pytest.approx(float(score), rel=1e-4, abs=1e-6)
            reasons.add(answer.finish_reason)
    assert "stop" in reasons or case.get("length_penalty", 0) > 1  # which makes the longest the best


def test_a_search_is_the_same_in_any_company(served: Served) -> None:
    model, llm = served
    ends = model.generation_config.eos_token_id
    search = ew.SamplingParams(max_tokens=20, num_beams=4, n=4, stop_token_ids=ends, logprobs=2)
    sampled = ew.SamplingParams(max_tokens=30, temperature=1.0, n=3, seed=3, frequency_penalty=0.4)
    prompts = [[40, 41, 42] * 11, [50] * 7, [40, 41, 42] * 20]
    alone = [llm.generate([prompt], search)[0] for prompt in prompts]
    mixed = llm.generate([*prompts, *prompts], [search] * 3 + [sampled] * 3)
    assert mixed[:3] == alone
    assert [answer.logprobs for answer in mixed[0].others] == [answer.logprobs for answer in alone[0].others]
    for answer in (alone[0], *alone[0].others):
        assert answer.logprobs is not None and answer.score is not None
        total = sum(entry.logprob for entry in answer.logprobs)
        assert answer.score == pytest.approx(total / len(answer.token_ids), rel=1e-5)
    blocks = llm.info()["prefix_cache"]["blocks"]
    assert all(of["held"] == 0 for of in blocks.values())


def test_a_search_that_runs_out_of_blocks_starts_over(served: Served, tmp_path: Path) -> None:
    """Little memory, and others that want it: the same answers, and every block comes back."""
    model, llm = served
    path = tmp_path / "model.bundle"
    ew.export(model, path, recipe="f32", targets=["cpu"])
    search = ew.SamplingParams(max_tokens=70, num_beams=3, n=3, ignore_eos=True)
    plain = ew.SamplingParams(max_tokens=70, ignore_eos=True)
    prompts = [[40, 41, 42] * 7, [50] * 20, [60, 61] * 15, [70] * 9]
    params = [search, plain, search, plain]
    expected = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    block = sum(cache_block_bytes(group) for group in Bundle.open(path).program("cpu").cache_groups)
    for prefix_cache in (True, False):
        with ew.LLM(path, memory=13 * block, prefix_cache=prefix_cache) as small:
            assert small.generate(prompts, params) == expected
            assert small.info()["preemptions"] > 0
            free = small.info()["kv_blocks_free"]
            assert all(count == small.engine.pools[name].total_blocks for name, count in free.items())


def test_a_search_that_can_never_fit_is_refused(tiny_bundle: Path) -> None:
    message = "num_beams: 4 sequences, and 3 requests run at a time"
    with ew.LLM(tiny_bundle, max_requests=3) as llm, pytest.raises(ew.CapacityError, match=message):
        llm.generate([[5]], ew.SamplingParams(num_beams=4))
    with ew.LLM(tiny_bundle) as llm:
        most = llm.info()["kv_cache_tokens"]
        context = llm.model.context_length
        tokens = context - 2
        if most // 3 > tokens:
            pytest.skip("three whole contexts fit")
        with pytest.raises(ew.CapacityError, match=r"num_beams: each of 3 sequences may need"):
            llm.generate([[5]], ew.SamplingParams(num_beams=3, max_tokens=tokens))
