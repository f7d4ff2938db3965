"""Targets with caches in blocks through engine and scheduler: tokens and logits are numpy's. The GPU is in memory."""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest

from enginewright.plugins.engines import library as tensorrt_library
from enginewright.plugins.engines.slots import FREE_SHARE
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.kv_cache import prefixes
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import BundleError, CapacityError, EnginewrightError, TargetError
from tests.plugins.engines import fake_tensorrt as fakes
from tests.plugins.engines.fake_tensorrt import fake_tensorrt
from tests.plugins.gpu.fake_driver import ADA, FakeCuda, FakeDevice, InstalledGpu
from tests.plugins.steps import tiny_onnx as tiny

from .packed_bundles import DECODE, PREFILL, SIZES, write_paged, write_segments

TOLERANCE = 1e-4  # as in test_onnxruntime.py
GREEDY = SamplingParams(temperature=0, max_tokens=tiny.CONTEXT, ignore_eos=True)
Install = Callable[..., FakeCuda]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packed")
    return {"paged": write_paged(folder / "paged.bundle"), "segments": write_segments(folder / "segments.bundle")}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a machine with a library and GPUs of this one."""

    def make(form: str, gpus: tuple[InstalledGpu, ...] = (ADA,), **options) -> FakeCuda:
        cuda = FakeCuda(gpus)
        if form == "paged":
            profiles = {0: (DECODE,), 1: (PREFILL,)}
            module = fake_tensorrt(cuda, profiles, name="tensorrt", version="11.4.0.106", **options)
        else:
            module = fake_tensorrt(cuda, SIZES, graphs=options.pop("graphs", True), **options)
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(tensorrt_library, "load_cuda", lambda: cuda)
        return cuda

    return make


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, tiny.V, n).tolist() for n in (1, 2, 3, 5, 5, 6, 11, 25, 30)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return [tiny.greedy(prompt, tiny.CONTEXT - len(prompt)) for prompt in prompts]


@pytest.mark.parametrize("form", ["paged", "segments"])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 5, "max_requests": 3}, {"memory": "48kB"}])
def test_greedy_tokens(
    install: Install,
    bundles: dict[str, Path],
    prompts: list[list[int]],
    expected: list[list[int]],
    form: str,
    options: dict[str, int],
) -> None:
    cuda = install(form)
    with LLM(bundles[form], **options, trust="code") as llm:  # type: ignore[arg-type]
        device = cuda.devices[-1]
        weights = device.pageable
        together = llm.generate(prompts, GREEDY)
        alone = llm.generate(prompts[4], GREEDY)
        info = llm.info()
    assert [list(r.token_ids) for r in together] == expected
    assert list(alone[0].token_ids) == expected[4]
    assert info["preemptions"] > 0 or "memory" not in options
    assert device.closed
    if form == "paged":
        assert info["executor"]["library"] == "TensorRT 11.4.0.106"
        assert info["executor"]["shape_changes"] == 0 < info["executor"]["contexts"] <= 24
        assert info["executor"]["caches"] == "in place"
    assert 0 < device.captured < device.launched == info["executor"]["graph_launches"]
    assert (device.pageable, weights > 0) == (weights, form == "segments")  # a step's inputs come in one copy


@pytest.mark.parametrize("form", ["paged", "segments"])
def test_what_the_gpu_holds_is_destroyed_in_order(install: Install, bundles, prompts, form: str) -> None:
    """Contexts before the memory that they use, which the fake sees to, and engines with them."""
    cuda = install(form)
    with LLM(bundles[form], trust="code") as llm:
        llm.generate(prompts[:3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        device = cuda.devices[-1]
        assert len(device.contexts) > 1 and len(cuda.engines) > 1
        engines = list(map(weakref.ref, cuda.engines))
    assert device.closed and not device.contexts
    assert not any(engine() for engine in engines)


def test_prompts_of_any_length_are_bound_to_few_sizes(install: Install, bundles, prompts) -> None:
    """Three: of one row for each of a step's requests, of more, and the last token of a prompt that is left over."""
    install("paged")
    with LLM(bundles["paged"], max_requests=1, prefix_cache=False, trust="code") as llm:
        for prompt in prompts[1:]:
            llm.logits(prompt)
            llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        about = llm.info()["executor"]
    assert (about["contexts"], about["shape_changes"]) == (3, 0)


@pytest.mark.parametrize("form", ["paged", "segments"])
@pytest.mark.parametrize("who", ["library", "driver"])
def test_steps_that_can_t_be_captured_run_without_a_graph(
    install: Install, bundles, prompts, expected, monkeypatch: pytest.MonkeyPatch, form: str, who: str
) -> None:
    cuda = install(form)
    if who == "library":
        for context in (fakes._Context, fakes._RtxContext):
            monkeypatch.setattr(context, "is_stream_capturable", lambda self, stream: False, raising=False)
    else:
        monkeypatch.setattr(FakeDevice, "capture", refuse)
    with LLM(bundles[form], trust="code") as llm:
        assert [list(r.token_ids) for r in llm.generate(prompts[:4], GREEDY)] == expected[:4]
        about = llm.info()["executor"]
    assert cuda.devices[-1].captured == about["graph_launches"] == 0
    reasons = {"library": "the library says that a step can't be captured", "driver": "cuStreamEndCapture failed"}
    assert about["not_captured"] == reasons[who]


def refuse(device: object, work: object) -> None:
    raise EnginewrightError("cuStreamEndCapture failed")


@pytest.mark.parametrize("memory", [300_000, 500_000])
def test_caches_leave_room_for_the_weights_of_segments(install: Install, bundles: dict[str, Path], memory: int) -> None:
    """Which are uploaded after the caches are allocated, and aren't in the engines."""
    path = bundles["segments"]
    opened, target = Bundle.open(path), "tensorrt-rtx"
    steps = json.loads((path / "targets" / target / "segments.json").read_text())["steps"]
    names = {name for step in steps for name in step.get("weights", {}).values()}
    names |= {step[key] for step in steps for key in ("sinks", "slopes") if step.get(key)}
    weights = sum(opened.weight(name).nbytes for name in names)
    engines = sum(file.stat().st_size for file in (path / "targets" / target).glob("*.plan"))
    assert weights > engines  # so that it matters
    install("segments", (InstalledGpu(0, "small", "8.9", memory),))
    with LLM(path, trust="code") as llm:
        caches = llm.info()["kv_cache_bytes"]
        most = int((memory - engines - weights) * FREE_SHARE)
        assert most / 2 < caches <= most
    install("segments", (InstalledGpu(0, "small", "8.9", engines + weights),))
    with pytest.raises(CapacityError, match=r"small has .* bytes free, and the engines alone need"):
        LLM(path, trust="code")


@pytest.mark.parametrize("form", ["paged", "segments"])
def test_one_request_of_nan_ends_alone(install: Install, bundles, prompts, expected, form: str) -> None:
    """In the middle of its tokens, while others decode; who gets its blocks next is well."""
    cuda = install(form)
    with LLM(bundles[form], max_requests=3, trust="code") as llm:
        requests = [Generation(p, GREEDY, max_tokens=tiny.CONTEXT - len(p)) for p in prompts[2:7]]
        for request in requests:
            llm.engine.add_request(request)
        while requests[1].output_length < 4:
            llm.engine.step()
        memory = llm.engine.executor._steps._memory  # type: ignore[attr-defined]
        for group in llm.engine.executor.cache_groups:
            for name in (f"{kind}_cache:{layer}" for kind in "kv" for layer in group.layers):
                first, size = memory.caches[name]
                for block in (b for b in requests[1].tables[group.name] if b >= 0):
                    cuda.devices[-1].view(first + block * size, np.dtype(np.float32), (size // 4,))[:] = np.nan
        while llm.engine.has_work():
            llm.engine.step()
        for group in llm.engine.executor.cache_groups:
            blocks = llm.engine.executor.blocks[group.name]
            for address, size in (memory.caches[f"{kind}_cache:{layer}"] for kind in "kv" for layer in group.layers):
                held = cuda.devices[-1].view(address, np.dtype(np.float32), (blocks * size // 4,))
                assert np.isfinite(held).all(), group.name
    assert [r.finish_reason for r in requests] == ["length", "error", "length", "length", "length"]
    tokens = [list(r.tokens[r.prompt_length :]) for r in requests]
    assert [tokens[0], *tokens[2:]] == [expected[2], *expected[4:7]]
    assert tokens[1] == expected[3][:4]


@pytest.mark.parametrize("form", ["paged", "segments"])
def test_prefixes_are_shared_and_copied(install: Install, bundles, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(prefixes, "LEAST_COPIED", 1)  # blocks are small here
    shared = [int(t) for t in np.random.default_rng(5).integers(3, 49, 40)]
    prompts = [[*shared[:n], 5, n] for n in (33, 33, 30, 11)]
    results = []
    for on in (False, True):
        install(form)
        with LLM(bundles[form], max_requests=2, prefix_cache=on, trust="code") as llm:
            results.append(
                [list(r.token_ids) for r in llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))]
            )
            use = llm.info()["prefix_cache"]
    assert results[0] == results[1]
    assert use["hits"] == 3 and use["copied_blocks"] > 0


def test_segments_in_graphs(install: Install, bundles, prompts, expected) -> None:
    """With a library that makes none by itself."""
    cuda = install("segments", graphs=False)
    with LLM(bundles["segments"], trust="code") as llm:
        assert [list(r.token_ids) for r in llm.generate(prompts[:4], GREEDY)] == expected[:4]
    assert 0 < cuda.devices[-1].captured < cuda.devices[-1].launched


@pytest.mark.parametrize("form", ["paged", "segments"])
def test_logits_of_all_tokens(install: Install, bundles, prompts, form: str) -> None:
    """More rows than a profile gives at once, and more tokens."""
    install(form)
    with LLM(bundles[form], trust="code") as llm:
        for prompt in prompts:
            np.testing.assert_allclose(llm.logits(prompt), tiny.reference(prompt), atol=TOLERANCE)


def test_pools_are_as_large_as_engines_hold(install: Install, bundles) -> None:
    install("paged")
    with LLM(bundles["paged"], memory="1GB", trust="code") as llm:
        assert llm._executor.blocks == {"full": 60, "window": 60}
    with pytest.raises(CapacityError, match="context: 41 tokens are more than the 40"):
        LLM(bundles["paged"], context=41, trust="code")


def test_a_gpu_without_kernels(install: Install, tmp_path: Path) -> None:
    install("segments", gpus=(InstalledGpu(0, "older", "8.6", 1 << 30),))
    path = write_segments(tmp_path / "ada.bundle")
    segments_file = path / "targets/tensorrt-rtx/segments.json"
    with LLM(path, trust="code") as llm:
        assert llm.info()["executor"]["gpu"] == "older (8.6)"
    install("segments", gpus=(InstalledGpu(0, "other", "8.0", 1 << 30),))
    with pytest.raises(TargetError, match=r"compute capability 8.6 or 8.9, and the GPU here is another: other \(8.0\)"):
        LLM(path, trust="code")
    kernel = json.loads(segments_file.read_text())["kernels"][0]["write"]
    damaged = path / f"targets/tensorrt-rtx/kernels/{kernel}.json"
    text = damaged.read_text()
    install("segments", gpus=(InstalledGpu(0, "older", "8.6", 1 << 30),))
    damaged.write_text(text.replace('"warps": 4', '"warps": 8'))
    with pytest.raises(BundleError, match=rf"{kernel}.json: made for something else than its name says"):
        LLM(path, trust="code")


def test_engines_for_prompts_are_needed(install: Install, tmp_path: Path) -> None:
    install("paged")
    with pytest.raises(BundleError, match="there is none for prompts"):
        LLM(write_paged(tmp_path / "decode.bundle", ("decode",)), trust="code")


@pytest.mark.parametrize("form", ["paged", "segments"])
def test_memory_that_is_not_there(install: Install, bundles, form: str) -> None:
    small = (InstalledGpu(0, "small", "8.9", 60_000),)
    install(form, gpus=small)
    with pytest.raises(CapacityError, match=r"don't fit into the memory of small"):
        LLM(bundles[form], memory="100kB", trust="code")


@pytest.mark.parametrize("form", ["paged", "segments"])
def test_a_lost_gpu_is_said_from_then_on(install: Install, bundles: dict[str, Path], form: str) -> None:
    """An error after which the GPU answers is a request's; one after which it doesn't is the process's."""
    cuda = install(form)
    illegal, answers = EnginewrightError("CUDA: cuLaunchKernel failed: CUDA_ERROR_ILLEGAL_ADDRESS"), True

    def fails(*given: object) -> None:
        raise illegal

    def synchronize() -> None:
        if not answers:
            raise EnginewrightError("CUDA: cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS")

    with LLM(bundles[form], trust="code") as llm:
        device, upload = cuda.devices[-1], cuda.devices[-1].upload
        device.synchronize = synchronize  # type: ignore[method-assign]
        device.upload = fails  # type: ignore[method-assign]
        with pytest.raises(EnginewrightError, match="ILLEGAL_ADDRESS"):
            llm.generate([1, 2], GREEDY)
        assert llm.lost == ""
        answers = False
        with pytest.raises(EnginewrightError, match=r"the GPU is lost to this process.*ILLEGAL_ADDRESS"):
            llm.generate([1, 2], GREEDY)
        device.upload, answers = upload, True  # type: ignore[method-assign]
        with pytest.raises(EnginewrightError, match="the GPU is lost to this process"):
            llm.generate([1, 2], GREEDY)
        assert "ILLEGAL_ADDRESS" in llm.lost
