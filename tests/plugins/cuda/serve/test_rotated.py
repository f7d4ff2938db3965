"""KV caches of k8v8 and k4v4 on the cuda target, in the interpreter: one bundle's answers beside the cpu target's."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from enginewright import LLM, SamplingParams
from enginewright.optimizer.export import export
from enginewright.plugins.cuda.compile.emitter import CudaEmitter
from enginewright.plugins.gpu.jit_launcher import products_in_order
from enginewright.runtime.shared.errors import TargetError
from tests.conftest import make_tiny_model
from tests.triton_interpreter import interpreter as interpreter

RECIPE = """
name = "rotated"
[weights]
default = {{ storage = "f32", activation = "float" }}
[kv_cache]
dtype = "{cache}"
[engines]
dtype = "f32"
requests = 4
chunk = 128
exact = {exact}
"""

ROUNDED = 2.0**-6
"""The share of the largest logit by which the targets may differ. Both read the same integers. The cpu target rounds
queries, and weights of values, to bf16, by 2^-9 each: a score of up to 4 is off by 2^-7 then, and so is its weight."""

LENGTH = 420
"""Tokens of a prompt: the last queries read the keys from 128 to 255 in 4 bits."""


def exported(
    folder: Path, cache: str, *, exact: bool = False, targets: tuple[str, ...] = ("cuda",), **sizes: Any
) -> Path:
    """A Llama's bundle, whose kernels aren't compiled: they are interpreted."""
    (folder / "rotated.toml").write_text(RECIPE.format(cache=cache, exact=str(exact).lower()))
    model = make_tiny_model("Llama", **{"num_hidden_layers": 1, "max_position_embeddings": 1024, **sizes})
    with patch.object(CudaEmitter, "_kernels", lambda *_: {}):
        export(model, folder / "bundle", recipe=folder / "rotated.toml", targets=list(targets))
    return folder / "bundle"


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    long = rng.integers(3, 250, LENGTH).tolist()
    return [long, long[:300] + rng.integers(3, 250, 30).tolist(), rng.integers(3, 250, 9).tolist()]


@products_in_order()
def answers(bundle: Path, batches: list[list[list[int]]], target: str = "cuda", **options: Any) -> tuple[Any, Any, Any]:
    """Returns the tokens of prompts, their logprobs, and the numbers of tokens from the prefix cache."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1)
    options_of_target = {"context": 512, "verify": False, "memory": "2MiB", "max_requests": 4, **options}
    if target == "cuda":
        options_of_target |= {"trust": "code"}
    with LLM(bundle, target=target, **options_of_target) as llm:
        results = [of for batch in batches for of in llm.generate(batch, params, progress=False)]
        tokens = [of.outputs[0].token_ids for of in results]
        logprobs = [
            [at[token].logprob for token, at in zip(of.outputs[0].token_ids, of.outputs[0].logprobs, strict=True)]
            for of in results
        ]
        return tokens, logprobs, [of.num_cached_tokens or 0 for of in results]


def logits(bundle: Path, target: str, prompt: list[int]) -> np.ndarray:
    options_of_target = {"trust": "code"} if target == "cuda" else {}
    with LLM(
        bundle, target=target, context=512, verify=False, memory="2MiB", prefill_chunk=100, **options_of_target
    ) as llm:
        return llm.logits(prompt)


@pytest.mark.parametrize(
    ("cache", "sizes"),
    [
        ("k4v4", {}),
        pytest.param("k4v4", {"head_dim": 48}, marks=pytest.mark.soak),
        pytest.param("k8v8", {"head_dim": 10}, marks=pytest.mark.matrix),
    ],
)
def test_logits_are_the_cpu_target_s(
    cache: str, sizes: dict[str, Any], tmp_path: Path, interpreter: ProcessPoolExecutor
) -> None:
    """The prompt is in chunks of 100 tokens; each of its tokens has logits."""
    bundle = exported(tmp_path, cache, targets=("cpu", "cuda"), **sizes)
    ours = interpreter.submit(logits, bundle, "cuda", prompts()[0]).result()
    meant = logits(bundle, "cpu", prompts()[0])
    assert np.abs(ours - meant).max() <= ROUNDED * np.abs(meant).max()


@pytest.mark.matrix
def test_answers_and_prefixes_are_the_cpu_target_s(tmp_path: Path, interpreter: ProcessPoolExecutor) -> None:
    """Three requests decode at once, with steps in flight. Then the first prompt goes on, and begins with its blocks:
    those of the ends' window and of the first tokens, and all of the 4 bits.
    """
    bundle = exported(tmp_path, "k4v4", targets=("cpu", "cuda"))
    batches = [prompts(), [[*prompts()[0], 5, 6]]]
    ours = interpreter.submit(answers, bundle, batches, prefill_chunk=100).result()
    meant = answers(bundle, batches, "cpu", prefill_chunk=100)
    alone = interpreter.submit(answers, bundle, batches[1:], prefix_cache=False).result()
    assert ours[0] == meant[0]
    np.testing.assert_allclose(np.array(ours[1]), np.array(meant[1]), atol=0.02, rtol=0)
    assert ours[2] == meant[2]
    assert ours[2][-1] >= LENGTH
    np.testing.assert_allclose(np.array(ours[1][-1:]), np.array(alone[1]), atol=1e-4, rtol=0)


@pytest.mark.matrix
def test_exact_mode_has_the_same_bits_alone_and_in_batches(tmp_path: Path, interpreter: ProcessPoolExecutor) -> None:
    bundle = exported(tmp_path, "k4v4", exact=True)
    alone = interpreter.submit(answers, bundle, [[of] for of in prompts()], prefix_cache=False).result()
    for options in ({"prefix_cache": False}, {"prefill_chunk": 70}):
        assert interpreter.submit(answers, bundle, [prompts()], **options).result()[:2] == alone[:2]


@pytest.mark.parametrize("cache", ["k8v4", "k6v4", "k5v4"])
def test_other_rotated_caches_are_refused_by_name(cache: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=f"target cuda: it has no KV cache of {cache}"):
        exported(tmp_path, cache)
