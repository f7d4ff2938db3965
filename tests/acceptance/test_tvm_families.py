"""The tvm target through our scheduler: the cpu target's tokens on tiny models of many families, in any batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.plugins.tvm.recipe import TvmOptions
from enginewright.plugins.tvm.section import KernelsName
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from tests.conftest import TINY_FAMILIES

from .test_families import MORE_FAMILIES, expected_logits
from .test_onnx_families import EXPERTS, LENGTHS, NEW_TOKENS
from .tiny_configs import tiny_family

USUALLY = ("Gemma2",)
"""Windows, caps and gates; the others are in the soak, but for one of experts in CI."""
MATRIX = ("gpt_oss", "GPT2")
"""Experts with sinks and biases; positions from a table."""

CASES = [
    case if case in USUALLY else pytest.param(case, marks=pytest.mark.matrix if case in MATRIX else pytest.mark.soak)
    for case in (*TINY_FAMILIES, *MORE_FAMILIES, *EXPERTS)
]

TOLERANCE = 1e-4
"""The largest difference of logits, as for the onnx target."""


@pytest.mark.parametrize("kernels", [None, pytest.param("enginewright", marks=pytest.mark.soak)])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_the_cpu_target_s(
    case: str, kernels: KernelsName | None, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    if case in EXPERTS:
        model = tiny_family(case)
    else:
        model = tiny_model(case.partition(" ")[0], **MORE_FAMILIES.get(case, {}))
    recipe = load_recipe("f32").model_copy(update={"tvm": TvmOptions(levels=("v3",), kernels=kernels)})
    export(model, tmp_path / "tiny.bundle", targets=("cpu", "tvm"), recipe=recipe)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 256, length).tolist() for length in LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(tmp_path / "tiny.bundle", target="cpu", threads=1, trust="code") as llm:
        expected = [list(result.token_ids) for result in llm.generate(prompts, params)]
    with LLM(tmp_path / "tiny.bundle", target="tvm", trust="code", threads=1) as llm:
        about = llm.info()["executor"]
        assert about["target"] == "tvm" and about.get("kernels") == kernels
        alone = [list(llm.generate(prompt, params)[0].token_ids) for prompt in prompts]
        together = [list(result.token_ids) for result in llm.generate(prompts, params)]
        logits = llm.logits(prompts[-1])
    with LLM(tmp_path / "tiny.bundle", target="tvm", trust="code", threads=2, prefill_chunk=16, max_requests=3) as llm:
        in_chunks = [list(result.token_ids) for result in llm.generate(prompts, params)]
        assert np.array_equal(llm.logits(prompts[-1]), logits)
    np.testing.assert_allclose(logits, expected_logits(model, prompts[-1]), atol=TOLERANCE)
    assert alone == expected
    assert together == expected
    assert in_chunks == expected
