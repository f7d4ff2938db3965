"""Export, build and run of the paged form, one after the other: tokens and logits are the cpu target's.

Plugins are created and launched by TensorRT's own bindings; what the library does with a network, and what a GPU does
with a kernel, is computed by ``numpy_tensorrt.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from enginewright.optimizer.emit.shared import attention_kernels
from enginewright.optimizer.export import export
from enginewright.runtime.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from tests.conftest import make_tiny_model
from tests.optimizer.emit.tensorrt import built_bundle
from tests.plugins.tensorrt.bindings_process import bindings_process

TOLERANCE = 2e-5
"""Of logits around 1, in 32-bit floats summed in other orders."""
TOKENS = 8

RECIPE = """
name = "small"
targets = ["cpu", "tensorrt"]

[weights.default]
storage = "f32"

[engines]
dtype = "f32"
gpus = ["8.9"]
requests = 4
prompts = 2
chunk = 8
context = 64
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    with bindings_process(tmp_path_factory.mktemp("tensorrt")) as pool:
        yield pool


def exported(folder: Path, family: str, more: str = "") -> Path:
    recipe = folder / "small.toml"
    recipe.write_text(RECIPE + more)
    with patch.object(attention_kernels, "compile_kernel", built_bundle.compile_kernel):
        export(make_tiny_model(family, num_hidden_layers=2), folder / "small.bundle", recipe=recipe)
    return folder / "small.bundle"


def prompts(vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, vocabulary, n).tolist() for n in (1, 3, 5, 9, 21)]


@pytest.mark.parametrize("family", ["Llama", "Mistral"])  # the second has windows
def test_a_bundle_is_built_and_runs(family: str, process: ProcessPoolExecutor, tmp_path: Path) -> None:
    path = exported(tmp_path, family)
    asked = prompts(256)
    ran = process.submit(built_bundle.build_and_run, str(path), asked, TOKENS, False, {"context": 64}).result()
    assert ran.report["built"] and ran.report["version"] == "11.4.0.106"
    assert ran.plugins == [
        {"kv_write": 2, "paged_attention_parts": 2, "combine_splits": 2},
        {"kv_write": 2, "paged_attention": 2},
    ]
    for layers in ran.layers:
        assert len(set(layers)) == len(layers)
        assert all(any(f"layers.{i}." in name and "ew.kv_write" in name for name in layers) for i in range(2))
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(path, target="cpu", threads=1) as cpu:
        for prompt, logits in zip(asked, ran.logits, strict=True):
            np.testing.assert_allclose(logits, cpu.logits(prompt), atol=TOLERANCE)
        assert ran.tokens == [list(r.token_ids) for r in cpu.generate(asked, params)]
    assert ran.info["graph_launches"] > 0
