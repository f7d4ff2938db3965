"""Bundles as exports write them run through the executors: a tiny model's logits and tokens are the cpu target's.

Plans are the very graphs that TensorRT-RTX would be given, and onnxruntime computes them.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import onnx
import pytest

from enginewright.optimizer.export import export
from enginewright.plugins.engines import emit_kernels as attention_kernels
from enginewright.plugins.engines import library as tensorrt_library
from enginewright.plugins.engines.section import TensorRtSection
from enginewright.plugins.engines.segments import schedule_of
from enginewright.plugins.gpu.compile_workers import KernelCompiler
from enginewright.plugins.tensorrt_rtx.compile import emit_segments, whole
from enginewright.plugins.tensorrt_rtx.compile.build_engine import BuiltEngine, EngineRequest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from tests.plugins.engines import tiny_paged
from tests.plugins.engines.fake_tensorrt import fake_tensorrt, rtx_plan
from tests.plugins.gpu.fake_driver import FakeCuda

TOLERANCE = 2e-5
"""The difference of logits around 1, in 32-bit floats summed in other orders."""

RECIPE = """
name = "small"
targets = ["cpu", "tensorrt-rtx"]

[weights.default]
storage = "f32"

[engines]
form = "{form}"
dtype = "f32"
gpus = ["8.9"]
requests = 4
prompts = 2
chunk = 8
"""


def build(request: EngineRequest, progress: object = None) -> BuiltEngine:
    """Builds in the place of TensorRT-RTX."""
    model = onnx.load(request.graph)  # with what lies beside it
    data = rtx_plan(model.SerializeToString(), 0b1000)
    request.plan.write_bytes(data)
    return BuiltEngine("1.7.1.116", len(data), 0.1, 1, len(model.graph.node), 1)


@pytest.mark.parametrize(
    ("form", "cache", "tolerance"),
    [
        ("whole", "f32", TOLERANCE),
        ("segments", "f32", TOLERANCE),
        ("segments", "int8", 0.03),  # the cpu target rounds queries, too
        ("segments", "fp8", 0.06),
    ],
)
def test_an_exported_bundle(
    form: str, cache: str, tolerance: float, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (whole, emit_segments):
        monkeypatch.setattr(module, "build_engine", build)
    compiler = partial(KernelCompiler, compiler=tiny_paged.compile_kernel)
    monkeypatch.setattr(attention_kernels, "KernelCompiler", compiler)
    tiny_paged.know_kernels()
    recipe = tmp_path / "small.toml"
    recipe.write_text(RECIPE.format(form=form) + f'[kv_cache]\ndtype = "{cache}"\n')
    path = tmp_path / "small.bundle"
    export(tiny_folder, path, recipe=recipe)

    bundle, cuda = Bundle.open(path, trust="code"), FakeCuda()
    section = bundle.targets["tensorrt-rtx"].section(TensorRtSection)
    assert section is not None and section.form == form
    segments = schedule_of(bundle, "tensorrt-rtx")
    if segments is not None:
        assert {group.dtype for group in segments.cache_groups} == {{"int8": "i8"}.get(cache, cache)}
    fake = fake_tensorrt(cuda, section.engines[0].profiles if segments is None else segments.profiles)
    fake.__spec__ = ModuleSpec("tensorrt_rtx", None)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", fake)
    monkeypatch.setattr(tensorrt_library, "load_cuda", lambda: cuda)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, bundle.model.vocab_size, n).tolist() for n in (1, 3, 5, 9, 21)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with (
        LLM(path, target="cpu", threads=1, trust="code") as cpu,
        LLM(path, target="tensorrt-rtx", trust="code", context=64) as engines,
    ):
        for prompt in prompts:
            np.testing.assert_allclose(engines.logits(prompt), cpu.logits(prompt), atol=tolerance)
        expected, tokens = ([r.token_ids for r in llm.generate(prompts, params)] for llm in (cpu, engines))
        assert tokens == expected or cache != "f32"
        assert engines.info()["executor"]["sampling"] == "on the GPU"


def test_masks_are_made_on_the_gpu(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that a step uploads don't grow with the slots."""
    plans: list[onnx.ModelProto] = []

    def keep(request: EngineRequest, progress: object = None) -> BuiltEngine:
        plans.append(onnx.load(request.graph))
        return build(request)

    monkeypatch.setattr(whole, "build_engine", keep)
    monkeypatch.setattr(whole, "emit_sampling_kernels", lambda *given: None)
    recipe = tmp_path / "small.toml"
    recipe.write_text(RECIPE.format(form="whole"))
    export(tiny_folder, tmp_path / "small.bundle", recipe=recipe)
    inputs = {value.name: value.type.tensor_type for value in plans[0].graph.input}
    assert {"input_ids", "position_ids", "write_index", "rows"} == {n for n in inputs if not n.startswith("past_")}
