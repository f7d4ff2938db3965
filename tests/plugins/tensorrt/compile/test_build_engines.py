"""Export, build and run of the paged form, one after the other: tokens and logits are the cpu target's.

Plugins are created and launched by TensorRT's own bindings; what the library does with a network, and what a GPU does
with a kernel, is computed by ``numpy_tensorrt.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from enginewright.optimizer.export import export
from enginewright.plugins.engines import emit_kernels as attention_kernels
from enginewright.plugins.engines.section import TensorRtSection
from enginewright.plugins.gpu.compile_workers import KernelCompiler
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import TargetError
from tests.conftest import make_tiny_model
from tests.plugins.engines.fake_tensorrt import SCRATCH_BYTES
from tests.plugins.tensorrt.bindings_process import bindings_process
from tests.plugins.tensorrt.compile import built_bundle

TOLERANCE = 2e-5
"""The difference of logits around 1, in 32-bit floats summed in other orders."""
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
    compiler = partial(KernelCompiler, compiler=built_bundle.compile_kernel)
    with patch.object(attention_kernels, "KernelCompiler", compiler):
        export(make_tiny_model(family, num_hidden_layers=2), folder / "small.bundle", recipe=recipe)
    return folder / "small.bundle"


def prompts(vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, vocabulary, n).tolist() for n in (1, 3, 5, 9, 21)]


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["Llama", "Mistral"])  # the second has windows
def test_a_bundle_is_built_and_runs(family: str, process: ProcessPoolExecutor, tmp_path: Path) -> None:
    check("aliased", family, process, tmp_path)


@pytest.mark.matrix
def test_writes_that_tensorrt_is_not_told_of(process: ProcessPoolExecutor, tmp_path: Path) -> None:
    check("ordered", "Llama", process, tmp_path)


@pytest.mark.parametrize(("cache", "largest"), [("int8", 0.03), ("fp8", 0.06)])
def test_caches_of_8_bits(cache: str, largest: float, process: ProcessPoolExecutor, tmp_path: Path) -> None:
    """Codes and scales are four tensors of a layer; logits are the cpu target's with such a cache, within rounding that
    begins elsewhere (of logits around 1), and further from those of a float cache."""
    path = exported(tmp_path, "Llama", f'[kv_cache]\ndtype = "{cache}"\n')
    (tmp_path / "floats").mkdir()
    floats = exported(tmp_path / "floats", "Llama")
    texts = prompts(256)
    ran = process.submit(built_bundle.build_and_run, str(path), texts, TOKENS, False, {"context": 64}).result()
    assert ran.plugins == [
        {"quantized_kv_write": 2, "quantized_paged_attention_parts": 2, "combine_splits": 2},
        {"quantized_kv_write": 2, "quantized_paged_attention": 2},
    ]
    assert ran.outputs == [9] * 2  # logits, and codes and scales of two layers
    (group,) = Bundle.open(path).targets["tensorrt"].section(TensorRtSection).paged.cache_groups  # type: ignore[union-attr]
    assert group.dtype == {"int8": "i8", "fp8": "fp8"}[cache]
    assert ran.info["graph_launches"] > 0 and ran.info["caches"] == "in place"
    with LLM(path, target="cpu", threads=1) as cpu, LLM(floats, target="cpu", threads=1) as exact:
        same = [np.abs(logits - cpu.logits(prompt)).max() for prompt, logits in zip(texts, ran.logits, strict=True)]
        off = [np.abs(logits - exact.logits(prompt)).max() for prompt, logits in zip(texts, ran.logits, strict=True)]
    assert max(same) < largest and all(a < b for a, b in zip(same, off, strict=True))


def check(caches: str, family: str, process: ProcessPoolExecutor, tmp_path: Path) -> None:
    path = exported(tmp_path, family, f'caches = "{caches}"\n')
    texts = prompts(256)
    ran = process.submit(built_bundle.build_and_run, str(path), texts, TOKENS, False, {"context": 64}).result()
    assert ran.report["built"] and ran.report["version"] == "11.4.0.106"
    write = {"aliased": "kv_write", "ordered": "ordered_kv_write"}[caches]
    assert ran.plugins == [
        {write: 2, "paged_attention_parts": 2, "combine_splits": 2},
        {write: 2, "paged_attention": 2},
    ]
    assert ran.outputs == [1 if caches == "ordered" else 5] * 2  # logits, and the caches of two layers
    for layers in ran.layers:
        assert len(set(layers)) == len(layers)
        assert all(any(f"layers.{i}." in name and "ew.kv_write" in name for name in layers) for i in range(2))
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(path, target="cpu", threads=1) as cpu:
        for prompt, logits in zip(texts, ran.logits, strict=True):
            np.testing.assert_allclose(logits, cpu.logits(prompt), atol=TOLERANCE)
        assert ran.tokens == [list(r.token_ids) for r in cpu.generate(texts, params)]
    assert ran.info["graph_launches"] > 0 and ran.info["sampling"] == "on the GPU"
    assert ran.info["caches"] == "in place" and ran.report["copies"] == []
    assert set(ran.report["scratch"].values()) == {SCRATCH_BYTES}


def test_copies_of_caches_in_engines_are_said(process: ProcessPoolExecutor, tmp_path: Path) -> None:
    """By the build, and when it is opened: with the scratch memory there, or as an error without."""
    blocks = 40
    path = exported(tmp_path, "Llama", f"blocks = {blocks}\n")
    few = prompts(256)[:2]
    options = {"context": 64, "memory": "100kB"}
    ran = process.submit(built_bundle.build_and_run, str(path), few, 2, True, options).result()
    assert ran.report["copies"] == list(ran.report["engines"])
    group = Bundle.open(path).targets["tensorrt"].section(TensorRtSection).paged.cache_groups[0]  # type: ignore[union-attr]
    caches = 2 * 2 * blocks * group.block_size * group.kv_heads * group.key_head_size * 4
    assert set(ran.report["scratch"].values()) == {SCRATCH_BYTES + caches}
    assert (ran.info["caches"], ran.info["scratch_bytes"]) == ("copied by TensorRT", SCRATCH_BYTES + caches)

    (tmp_path / "largest").mkdir()
    path = exported(tmp_path / "largest", "Llama")  # 4 million blocks
    with pytest.raises(TargetError, match=r"decode-.*\.engine: TensorRT put copies of the caches into this engine"):
        process.submit(built_bundle.build_and_run, str(path), few, 2, True, options).result()
