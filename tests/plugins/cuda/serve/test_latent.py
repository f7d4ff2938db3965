"""Models with multi-head latent attention on the cuda target, in the interpreter: a saved folder, its bundle, an LLM.

The cache of a token is one latent vector and the part of the key that all heads share, as on the cpu target.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from enginewright import LLM, SamplingParams
from enginewright.optimizer.export import export
from enginewright.plugins.cuda.compile.emitter import CudaEmitter
from enginewright.runtime.bundle.reader import Bundle
from tests.acceptance.test_families import TOLERANCE, expected_logits
from tests.acceptance.tiny_configs import tiny_family
from tests.triton_interpreter import interpreter as interpreter

RECIPE = """
name = "latent"
[weights]
default = { storage = "f32", activation = "float" }
[engines]
dtype = "f32"
requests = 4
chunk = 32
"""

SIZES: dict[str, dict[str, Any]] = {
    "small": {},  # 4 heads, a latent vector of 16 channels and a key of 8
    # 20 heads, of which a program has 10, and a latent vector of 40 channels
    "many heads": {"num_attention_heads": 20, "num_key_value_heads": 20, "hidden_size": 80, "kv_lora_rank": 40},
}
LATENT = {"small": 16 + 8, "many heads": 40 + 8}


def exported(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """A saved model's bundle for cuda, whose kernels aren't compiled: they are interpreted."""
    model.save_pretrained(folder / "saved")
    (folder / "latent.toml").write_text(RECIPE)
    bundle = folder / "latent.bundle"
    with patch.object(CudaEmitter, "_kernels", lambda *_: {}):
        export(folder / "saved", bundle, recipe=folder / "latent.toml", **{"targets": ["cuda"], **options})
    return bundle


def served(bundle: Path, prompts: list[list[int]]) -> tuple[list[np.ndarray], list[list[int]], list[list[float]], Any]:
    """The logits of prompts, the greedy tokens after them, all at once and then the last again, and their logprobs."""
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=1)
    with LLM(bundle, target="cuda", trust="code", memory="2MiB", context=96, verify=False) as llm:
        logits = [llm.logits(prompt) for prompt in prompts]
        results = llm.generate(prompts, params, progress=False) + llm.generate(prompts[-1:], params, progress=False)
        outputs = [result.outputs[0] for result in results]
        logprobs = [[at[token].logprob for token, at in zip(of.token_ids, of.logprobs, strict=True)] for of in outputs]
        return logits, [list(of.token_ids) for of in outputs], logprobs, llm.info()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3"])
def test_logits_and_answers_are_those_of_transformers(
    family: str, sizes: str, tmp_path: Path, interpreter: ProcessPoolExecutor
) -> None:
    """Prompts of more tokens than a step has are cut; the last prompt is found in the cache the second time."""
    model = tiny_family(family, **SIZES[sizes])
    bundle = exported(model, tmp_path)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 256, n).tolist() for n in (3, 45)]
    logits, tokens, logprobs, info = interpreter.submit(served, bundle, prompts).result()
    for prompt, of_prompt in zip(prompts, logits, strict=True):
        np.testing.assert_allclose(of_prompt, expected_logits(model, prompt), atol=TOLERANCE, rtol=0)
    for prompt, answer, chosen in zip([*prompts, prompts[-1]], tokens, logprobs, strict=True):
        after = torch.from_numpy(expected_logits(model, prompt + answer)[len(prompt) - 1 : -1])
        meant = after.log_softmax(-1)[range(len(answer)), answer]
        np.testing.assert_allclose(chosen, meant, atol=TOLERANCE, rtol=0)
    assert tokens[-1] == tokens[-2] and info["prefix_cache"]["hits"] > 0
    (group,) = Bundle.open(bundle).program("cuda").cache_groups
    assert group.values_in_keys
    assert info["kv_cache_token_bytes"] == 4 * LATENT[sizes] * len(group.layers)


def test_targets_of_one_bundle_have_one_form(tmp_path: Path) -> None:
    """The cpu target beside it has the latent vector too; with one that has no such cache, neither has."""
    model = tiny_family("deepseek_v3")
    for number, (other, latent) in enumerate({"cpu": True, "onnx": False}.items()):
        (tmp_path / str(number)).mkdir()
        bundle = Bundle.open(exported(model, tmp_path / str(number), targets=["cuda", other]))
        assert {group.values_in_keys for group in bundle.program("cuda").cache_groups} == {latent}
