"""Targets of whole-model engines through engine and scheduler: tokens and logits are numpy's. The GPU is in memory."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.engines import library as tensorrt_library
from enginewright.plugins.engines.section import EngineSection, ProfileSection, TensorRtSection
from enginewright.plugins.steps.linear_io import LinearCacheGroup, LinearIo
from enginewright.runtime.bundle.manifest import Manifest, ModelSection, SourceSection, TargetManifest
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import (
    BundleError,
    CapacityError,
    MissingDependencyError,
    RequestError,
    TargetError,
)
from tests.plugins.engines.fake_tensorrt import fake_tensorrt, rtx_plan
from tests.plugins.gpu.fake_driver import ADA, FakeCuda, InstalledGpu
from tests.plugins.steps import tiny_onnx as tiny

C = 33
TOLERANCE = 1e-4  # as in test_onnxruntime.py
GREEDY = SamplingParams(temperature=0, max_tokens=C, ignore_eos=True)
DECODE = ProfileSection(phase="decode", B=(1, 4, 8), S=(1, 1, 1), R=(1, 4, 8), C=C)
PREFILL = ProfileSection(phase="prefill", B=(1, 1, 2), S=(1, 8, 10), R=(1, 1, 4), C=C)
PROFILES = (DECODE, PREFILL)


def narrow_model() -> bytes:
    """The tiny model with integers of 32 bits, and logits of 16, as engines may have them."""
    model = tiny.make_model()
    graph = model.graph
    for value in graph.input:
        if value.type.tensor_type.elem_type == TensorProto.INT64:
            value.type.tensor_type.elem_type = TensorProto.INT32
            for node in graph.node:
                node.input[:] = [f"{value.name}_64" if name == value.name else name for name in node.input]
            graph.node.insert(0, helper.make_node("Cast", [value.name], [f"{value.name}_64"], to=TensorProto.INT64))
    for node in graph.node:
        node.output[:] = ["wide" if name == "logits" else name for name in node.output]
    graph.node.append(helper.make_node("Cast", ["wide"], ["logits"], to=TensorProto.FLOAT16))
    next(v for v in graph.output if v.name == "logits").type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.checker.check_model(model)
    return model.SerializeToString()


def write_bundle(
    path: Path,
    model: bytes,
    profiles: tuple[ProfileSection, ...] = PROFILES,
    kernels: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    data = rtx_plan(model)
    engine = EngineSection(
        file="model.plan", bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), profiles=profiles
    )
    section = TensorRtSection(
        flavour="rtx",
        version="1.7.1.116",
        compute_capabilities=("8.0", "8.6", "8.9"),
        dtype="f32",
        engines=(engine,),
    )
    groups = tuple(LinearCacheGroup.from_group(group) for group in tiny.GROUPS)
    io = LinearIo(file="", opset=24, onnxruntime="1.25.0", cache_groups=groups, summed_products=8)
    manifest = Manifest(
        model=ModelSection(name="tiny", architecture="Tiny", vocab_size=tiny.V, context_length=tiny.CONTEXT),
        source=SourceSection(kind="module", name="tiny"),
        targets=(),
    )
    with BundleWriter(path) as writer:
        for name, content in TokenizerFiles().to_files().items():
            writer.write_bytes(name, content)
        writer.write_bytes("targets/tensorrt-rtx/model.plan", data)
        for name, content in kernels.items():
            writer.write_bytes(f"targets/tensorrt-rtx/kernels/{name}", content)
        writer.commit(manifest, {"tensorrt-rtx": TargetManifest(sections={"io": io, "tensorrt": section})})
    return path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensorrt")
    return write_bundle(folder / "tiny.bundle", tiny.make_model().SerializeToString())


Install = Callable[..., FakeCuda]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a machine with TensorRT-RTX and GPUs of this one."""

    def make(
        gpus: tuple[InstalledGpu, ...] = (ADA,), profiles: tuple[ProfileSection, ...] = PROFILES, **options
    ) -> FakeCuda:
        cuda = FakeCuda(gpus)
        module = fake_tensorrt(cuda, profiles, **options)
        module.__spec__ = ModuleSpec("tensorrt_rtx", None)
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", module)
        monkeypatch.setattr(tensorrt_library, "load_cuda", lambda: cuda)
        return cuda

    return make


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, tiny.V, n).tolist() for n in (1, 2, 3, 5, 5, 6, 11, 25)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return [tiny.greedy(prompt, C - 1 - len(prompt)) for prompt in prompts]


@pytest.mark.parametrize(
    ("graphs", "options"),
    [(False, {}), (True, {}), (False, {"prefill_chunk": 7, "max_requests": 3}), (False, {"max_requests": 12})],
)
def test_greedy_tokens(
    install: Install, bundle: Path, prompts: list[list[int]], expected: list[list[int]], graphs: bool, options
) -> None:
    cuda = install(graphs=graphs)
    with LLM(bundle, **options, trust="code") as llm:
        together = llm.generate(prompts, GREEDY)
        alone = llm.generate(prompts[4], GREEDY)
        info = llm.info()
    assert [list(r.token_ids) for r in together] == expected
    assert list(alone[0].token_ids) == expected[4]
    assert info["executor"]["target"] == "tensorrt-rtx"
    assert info["executor"]["library"] == "TensorRT-RTX 1.7.1.116"
    assert info["context_length"] == C - 1
    device = cuda.devices[-1]
    assert device.closed
    if graphs:  # the library makes its own
        assert device.captured == device.launched == 0
    else:
        assert 0 < device.captured <= 16 < device.launched


def test_logits_of_all_tokens(install: Install, bundle: Path, prompts: list[list[int]]) -> None:
    """More rows than the profile gives at once, and more tokens."""
    install()
    with LLM(bundle, prefill_chunk=12, trust="code") as llm:
        for prompt in prompts:
            np.testing.assert_allclose(llm.logits(prompt), tiny.reference(prompt), atol=TOLERANCE)


def test_integers_of_32_bits_and_logits_of_16(install: Install, prompts: list[list[int]], tmp_path: Path) -> None:
    install()
    with LLM(write_bundle(tmp_path / "narrow.bundle", narrow_model()), trust="code") as llm:
        for prompt in prompts[:3]:  # of logits up to 35, 16 bits keep 0.016
            np.testing.assert_allclose(llm.logits(prompt), tiny.reference(prompt), atol=0.02)


def test_decode_profiles_alone(install: Install, prompts: list[list[int]], expected, tmp_path: Path) -> None:
    install(profiles=(DECODE,))
    path = write_bundle(tmp_path / "decode.bundle", tiny.make_model().SerializeToString(), (DECODE,))
    with LLM(path, trust="code") as llm:
        assert list(llm.generate(prompts[5], GREEDY)[0].token_ids) == expected[5]


def test_memory(install: Install, bundle: Path) -> None:
    slot = 4 * tiny.NKV * (tiny.D + tiny.DV) * 2 * C
    install()
    with LLM(bundle, memory=3 * slot, trust="code") as llm:
        assert llm.info()["kv_cache_bytes"] == 3 * slot
    install(gpus=(InstalledGpu(0, "small", "8.9", 400_000),))
    with LLM(bundle, trust="code") as llm:  # most of what the engine leaves
        size = (bundle / "targets/tensorrt-rtx/model.plan").stat().st_size
        assert llm.info()["kv_cache_bytes"] == int((400_000 - size) * 0.8) // slot * slot
    install(gpus=(InstalledGpu(0, "tiny", "8.9", 1000),))
    with pytest.raises(CapacityError, match="tiny has 1,000 bytes free, and the engines alone need"):
        LLM(bundle, trust="code")
    with pytest.raises(CapacityError, match=r"memory: caches of .* bytes, .* don't fit into the memory of tiny"):
        LLM(bundle, memory="1MiB", trust="code")


def test_numbers_that_are_not_finite_stay_with_their_request(
    install: Install, bundle: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """The slot of a request that ends with an error is cleared, for the request that gets it next."""
    cuda = install()
    with LLM(bundle, max_requests=2, trust="code") as llm:
        requests = [Generation(prompt, GREEDY, max_tokens=C - 1 - len(prompt)) for prompt in prompts[2:5]]
        for request in requests:
            llm.engine.add_request(request)
        while requests[0].output_length < 4:
            llm.engine.step()
        slot = requests[0].tables[llm.engine.executor.cache_groups[0].name][0]
        for address, size in llm.engine.executor._steps._memory.caches.values():  # type: ignore[attr-defined]
            cuda.devices[-1].view(address + slot * size, np.dtype(np.float32), (size // 4,))[:] = np.nan
        while llm.engine.has_work():
            llm.engine.step()
        for address, size in llm.engine.executor._steps._memory.caches.values():  # type: ignore[attr-defined]
            assert np.isfinite(cuda.devices[-1].view(address, np.dtype(np.float32), (2 * size // 4,))).all()
    assert [request.finish_reason for request in requests] == ["error", "length", "length"]
    assert [list(r.tokens[r.prompt_length :]) for r in requests[1:]] == expected[3:5]


def test_context(install: Install, bundle: Path) -> None:
    install()
    with pytest.raises(CapacityError, match=f"context: {C} tokens are more than the {C - 1} that the engines"):
        LLM(bundle, context=C, trust="code")
    with pytest.raises(RequestError, match="provider: 'cuda' is for target 'onnx' or 'stablehlo', not 'tensorrt-rtx'"):
        LLM(bundle, provider="cuda", memory="1MiB", trust="code")


def test_what_is_missing(install: Install, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(MissingDependencyError, match=r"TensorRT-RTX is not installed.*by 1.7.1.116\n.*pip install"):
        LLM(bundle, trust="code")
    install(version="1.8.0.1")
    with pytest.raises(TargetError, match=r"built by TensorRT-RTX 1.7.1.116, and 1.8.0.1 is installed"):
        LLM(bundle, trust="code")
    install(gpus=(InstalledGpu(0, "NVIDIA H200", "9.0", 1 << 37),))
    with pytest.raises(TargetError, match=r"for compute capability 8.0, 8.6 or 8.9.*NVIDIA H200 \(9.0\)"):
        LLM(bundle, trust="code")
    install(gpus=())
    with pytest.raises(
        TargetError, match=r"NVIDIA GPU of compute capability 8.0, 8.6 or 8.9, and the driver shows none"
    ):
        LLM(bundle, trust="code")
    install(refuses="Engine was serialized for another platform.")
    with pytest.raises(
        BundleError, match=r"model.plan: TensorRT-RTX 1.7.1.116 can't load.*4090 \(8.9\): Engine was ser"
    ):
        LLM(bundle, trust="code")
    install(refuses="getPluginCreator could not find plugin kv_write version 1")
    with pytest.raises(TargetError, match="lacks a plugin that this engine has: getPluginCreator could not find"):
        LLM(bundle, trust="code")
    monkeypatch.undo()


def test_no_driver(install: Install, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.undo()
    module = fake_tensorrt(FakeCuda(), PROFILES)
    module.__spec__ = ModuleSpec("tensorrt_rtx", None)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", module)
    monkeypatch.setattr(tensorrt_library, "load_cuda", lambda: load_missing())
    with pytest.raises(TargetError, match=r"there is no NVIDIA driver here: libnone.so: .*\n.*docker run --gpus"):
        LLM(bundle, trust="code")


def load_missing():
    from enginewright.plugins.gpu.cuda_driver import load_cuda

    return load_cuda("libnone.so")


def test_an_engine_of_another_form(install: Install, tmp_path: Path) -> None:
    install()
    model = tiny.make_model()
    del model.graph.output[1]
    path = write_bundle(tmp_path / "other.bundle", model.SerializeToString())
    with pytest.raises(BundleError, match="not what the target's manifest says: it lacks present_key_0"):
        LLM(path, trust="code")
    profiles = (DECODE, PREFILL.model_copy(update={"C": 20}))
    path = write_bundle(tmp_path / "lengths.bundle", tiny.make_model().SerializeToString(), profiles)
    with pytest.raises(BundleError, match=r"profiles: their slots are of 20 and 33 places"):
        LLM(path, trust="code")
