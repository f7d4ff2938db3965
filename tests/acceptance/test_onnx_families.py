"""onnxruntime through our scheduler: transformers' greedy tokens on tiny models of many families, in any batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from tests.conftest import TINY_FAMILIES

from .test_families import MORE_FAMILIES, expected_logits
from .tiny_configs import tiny_family

EXPERTS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""Families that are made by their model_type; the others are by their class."""

USUALLY = ("Gemma2", "GPT2", "mixtral")
"""Windows and caps; positions from a table and biases everywhere; experts. The others are in the matrix."""

CASES = [
    case if case in USUALLY else pytest.param(case, marks=pytest.mark.matrix)
    for case in (*TINY_FAMILIES, *MORE_FAMILIES, *EXPERTS)
]

LENGTHS, NEW_TOKENS = (1, 7, 21, 22, 40), 10

TOLERANCE = 1e-4
"""Two orders of summation in 32-bit floats over 2 to 4 layers, as for the cpu target; measured 2e-5 at most."""


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers(
    case: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    if case in EXPERTS:
        model = tiny_family(case)
    else:
        model = tiny_model(case.partition(" ")[0], **MORE_FAMILIES.get(case, {}))
    export(model, tmp_path / "tiny.bundle", targets=("onnx",))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 256, length).tolist() for length in LENGTHS]
    expected = [greedy(model, prompt) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(tmp_path / "tiny.bundle", threads=1, context=64) as llm:
        assert llm.info()["executor"]["target"] == "onnx"
        alone = [list(llm.generate(prompt, params)[0].token_ids) for prompt in prompts]
        together = [list(result.token_ids) for result in llm.generate(prompts, params)]
        logits = llm.logits(prompts[-1])
    with LLM(tmp_path / "tiny.bundle", threads=1, context=64, prefill_chunk=16, max_requests=3) as llm:
        in_chunks = [list(result.token_ids) for result in llm.generate(prompts, params)]
    np.testing.assert_allclose(logits, expected_logits(model, prompts[-1]), atol=TOLERANCE)
    assert alone == expected
    assert together == expected
    assert in_chunks == expected


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Generates with transformers and its cache."""
    tokens: list[int] = []
    with torch.no_grad():
        out = model(input_ids=torch.tensor([prompt]), use_cache=True)
        for _ in range(NEW_TOKENS):
            tokens.append(int(out.logits[0, -1].argmax()))
            out = model(input_ids=torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
    return tokens
