"""The cuda target without a GPU: CPU tensors with interpreted kernels, graphs that are replayed, fake tensors."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gpu_fault
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.plugins.cuda.compile.emitter import CudaEmitter
from enginewright.plugins.cuda.section import CudaSection
from enginewright.plugins.cuda.serve import executor as cuda_blocks
from enginewright.plugins.cuda.serve import steps as steps_module
from enginewright.plugins.cuda.serve.program import TORCH_DTYPES, CudaProgram, Place
from enginewright.plugins.gpu.call import Call
from enginewright.plugins.gpu.jit_launcher import JitLauncher
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.gpu.tiles import GPUS
from enginewright.plugins.steps.packed_steps import StepLimits, StepShape, input_shapes
from enginewright.runtime.shared.errors import BundleError, EnginewrightError, TargetError
from tests.plugins.cuda.serve import cuda_cases as cases
from tests.plugins.gpu.fake_driver import FakeCuda
from tests.runtime.server.conftest import Server
from tests.runtime.server.conftest import make_server as make_server
from tests.triton_interpreter import interpreter as interpreter


def test_products_add_in_float32_while_a_model_is_open() -> None:
    """Settings of the process are changed once, whatever the order in which models are closed, and then restored."""
    products: Any = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")

    def settings() -> list[bool]:
        return [getattr(products, name) for name in names]

    gc.collect()  # steps of other tests
    before = settings()
    program, context = cases.program_of("Llama")
    lowering = cases.lowered(program, context, "f32")
    first, second = (cases.steps_of(lowering, 256, launcher=cases.Devices(cases.CPU)) for _ in range(2))
    assert settings() == [False, False]
    first.close()
    first.close()
    assert settings() == [False, False]
    second.close()
    assert settings() == before == [True, True]


def on_gpu(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> Callable[[], Any]:
    """Opens the first GPU of a driver in memory, since torch has no CUDA."""
    processors = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cuda_blocks, "load_cuda", lambda: cuda)
    monkeypatch.setattr(cuda_blocks, "_idle", {})
    return lambda: cuda_blocks._OnGpu(cuda.gpus[0], "8.9")


def test_a_gpu_gets_back_what_torch_kept_then_memory_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    place = on_gpu(monkeypatch, FakeCuda())()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("cache"))
    monkeypatch.setattr(place._opened, "empty", lambda: done.append("memory and kernels"))
    place.close()
    assert done == ["cache", "memory and kernels"]


def test_copies_are_over_before_pinned_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on a stream of their own, for which the driver in front of the process doesn't wait."""
    done: list[str] = []
    place = on_gpu(monkeypatch, FakeCuda())()
    stream = SimpleNamespace(synchronize=lambda: done.append("copies"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(place._opened, "empty", lambda: done.append("memory"))
    assert len(place.pinned(8)) == 8
    assert [lane.stream for lane in place.lanes()] == [place._stream, stream]
    place.close()
    assert done == ["copies", "memory"]


def test_a_stream_outlives_its_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch records an event on it when pinned memory is freed, which may be at the end of the process."""
    cuda = FakeCuda()
    opened = on_gpu(monkeypatch, cuda)
    first = opened()
    first._opened.allocate(8)
    first.close()
    assert [(device.closed, device.memory) for device in cuda.devices] == [(False, {})]
    again, other = opened(), opened()
    assert again._opened is first._opened  # opening and closing adds no streams
    assert other._opened is not again._opened
    again.close()
    other.close()
    opened()
    assert [device.closed for device in cuda.devices] == [False, False]


def test_work_is_on_the_place_s_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["the caller's"]

    @contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    place = on_gpu(monkeypatch, FakeCuda())()
    assert current == ["the caller's"]
    with place.entered():
        assert current[-1] == place._opened.stream
    assert current == ["the caller's"]


def test_a_lost_gpu_is_not_opened_again_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    opened = on_gpu(monkeypatch, cuda)
    place = opened()

    def lost() -> None:
        raise EnginewrightError("CUDA: cuStreamSynchronize failed")

    monkeypatch.setattr(place._opened, "empty", lost)
    with pytest.raises(EnginewrightError):
        place.close()
    assert opened()._opened is not place._opened


@pytest.mark.parametrize(
    ("case", "recipe"),
    [("Llama", "f32"), ("GPT2", "int4"), ("Mixtral", "int8"), ("DeepseekV3", "f32"), ("Phimoe", "f32")],
)
def test_all_that_runs_is_on_the_gpu(case: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's operations on fake tensors of the device cuda: what has another device, or type, would be refused."""

    def copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return torch.ops.aten.copy_.default(to, source, non_blocking)

    def contiguous(x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    # These methods ask for a CUDA that this torch may lack.
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)
    program, context = cases.program_of(case, recipe)
    lowered = cases.lowered(program, context, "bf16").program
    device = torch.device("cuda", 0)
    launcher = cases.Devices(device)
    with torch.inference_mode(), FakeTensorMode():
        weights = {}
        for use in lowered.weights:
            shape = (*use.shape[:-1], use.shape[-1] // 2) if use.dtype in ("i4", "u4") else use.shape
            weights[use.name] = torch.empty(shape, dtype=TORCH_DTYPES[use.dtype], device=device)
        bound = CudaProgram(
            lowered,
            weights,
            Place(device, GPUS[90], launcher),
            blocks={group.name: 4 for group in lowered.cache_groups},
            limits=StepLimits(tokens=64, requests=8, rows=64, blocks=32),
        )
        for shape in (StepShape(0, 8, 8, 8, 32, True), StepShape(0, 64, 4, 4, 4, False)):
            inputs = {
                name: torch.empty(size, dtype=torch.int32, device=device)
                for name, size in input_shapes(bound.groups, shape).items()
            }
            works, outputs, _ = bound.bound(shape, inputs)
            logits = outputs["logits"]
            for work in works:
                work()
            assert (tuple(logits.shape), logits.device, logits.dtype) == ((shape.rows, 256), device, torch.bfloat16)
    assert launcher.calls > 10


def test_nothing_of_the_cpu_target_is_loaded() -> None:
    code = "import sys, enginewright.plugins.cuda.serve.executor\n"
    code += "print([m for m in sys.modules if 'enginewright.plugins.cpu' in m or 'enginewright.optimizer' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_torch_without_cuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    section = CudaSection(compute_capabilities=("9.0",), dtype="bf16", requests=4, chunk=64)
    with pytest.raises(TargetError, match=r"target cuda: PyTorch .* (is a build without CUDA|sees no GPU)"):
        cuda_blocks.place_of(section)


def lost_gpu(bundle: str) -> list[tuple[str, str]]:
    """The answers of ``LLM`` around a launch that fails, after which the GPU answers nothing."""
    from enginewright import LLM, SamplingParams

    records: list[tuple[str, str]] = []
    broken = False

    class Fails(JitLauncher):
        def bind(self, call: Call) -> Callable[[], object]:
            launch = super().bind(call)
            return lambda: fail() if broken else launch()

    def fail(*given: object) -> None:
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with (
        patch.object(cuda_blocks._Interpreted, "launcher", lambda *given: Fails()),
        patch.object(cuda_blocks._Interpreted, "probe", fail),
        LLM(bundle, target="cuda", trust="code", context=64, max_requests=2, memory="1MiB") as llm,
    ):
        for state in (False, True, True, False):
            broken = state
            try:
                result = llm.generate([1, 2, 3], SamplingParams(max_tokens=1, temperature=0.0))[0]
                records.append((str(len(result.token_ids)), llm.lost))
            except EnginewrightError as e:
                records.append((e.message, llm.lost))
        info = llm.info()["executor"]
        assert info["late_binds"] > 0 and info["late_graphs"] == 0
    return records


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A tiny model for the target, without kernels: interpreted ones aren't compiled."""
    path = tmp_path_factory.mktemp("cuda") / "tiny.bundle"
    engines = EnginesSection(dtype="f32", requests=8, chunk=64, gpus=("8.0",))
    recipe = load_recipe("f32").model_copy(update={"engines": engines})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CudaEmitter, "_kernels", lambda *given: {})
        export(tiny_folder, path, recipe=recipe, targets=("cuda", "cpu"))
    return path


@pytest.mark.matrix
def test_a_lost_gpu_is_said_from_then_on(bundle: Path, interpreter: ProcessPoolExecutor) -> None:
    first, *others = interpreter.submit(lost_gpu, str(bundle)).result()
    assert first == ("1", "")
    assert len(others) == 3
    for message, lost in others:
        assert "the GPU is lost to this process" in message and "illegal memory access" in lost


@pytest.mark.matrix
def test_a_server_starts_another_engine_where_the_gpu_is_lost(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_server: Callable[..., Server]
) -> None:
    """A fault is planted in the engine's process: a request fails, ``/health`` is 503, and the next one is answered."""
    fault = tmp_path / "fault"
    (tmp_path / "sitecustomize.py").write_text(gpu_fault.SITE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(gpu_fault.FILE_VARIABLE, str(fault))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = ("--target", "cuda", "--trust", "code", "--context", "64", "--max-requests", "2", "--memory", "1MiB")
    server = make_server(bundle, *options)
    request = {"prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0}
    before = server.complete(**request)
    assert before.status == 200 and server.ask("GET", "/health").status == 200
    (old,) = server.engines()
    fault.touch()
    server.wait(lambda: not fault.exists() and server.complete(**request).status != 200)
    server.wait(lambda: server.ask("GET", "/health").status == 503)
    server.wait(lambda: server.ask("GET", "/health").status == 200)
    assert server.complete(**request).text == before.text
    assert server.engines() != [old]
    assert "the engine ends: the GPU is lost to this process" in server.errors.read_text()


def answers_with_forms(bundle: str, target: str) -> list[list[list[int]]]:
    """Tokens of the sequences of each request: with forms, some beside plain ones, and of beam searches with forms."""
    from enginewright import LLM, SamplingParams

    form = {"regex": "[a-f]{2}(cat|dog|dot)[0-9]+"}
    options = {"target": target, "trust": "code", "context": 64, "max_requests": 8, "memory": "2MiB"}
    with LLM(bundle, **options) as llm:
        params = [
            SamplingParams(max_tokens=8, temperature=t, seed=n, structured_outputs=form if n % 3 else None, logprobs=2)
            for n, t in enumerate((0, 0, 0.9, 1.3, 0.8))
        ]
        results = llm.generate([[5, 6, 7 + n] for n in range(5)], params, progress=False)
        answers = [[list(output.token_ids) for output in result.outputs] for result in results]
        search = SamplingParams(num_beams=3, n=3, max_tokens=6, structured_outputs=form)
        beams = llm.generate([[5, 6, 7], [9, 8]], search, progress=False)
        return [*answers, *([list(output.token_ids) for output in result.outputs] for result in beams)]


@pytest.mark.matrix
def test_forms_have_the_cpu_target_s_tokens_also_with_beams(bundle: Path, interpreter: ProcessPoolExecutor) -> None:
    ours, theirs = (interpreter.submit(answers_with_forms, str(bundle), target).result() for target in ("cuda", "cpu"))
    assert ours == theirs
    assert [len(sequences) for sequences in ours[-2:]] == [3, 3]


def in_its_stream(bundle: str) -> tuple[list[bool], list[str]]:
    """True for each time that the place's stream was the current one as it has to be: when a step starts, not after it
    was submitted, and when its result is read; and what was done after opening failed."""
    from enginewright import LLM, SamplingParams

    inside: list[bool] = []
    done: list[str] = []
    current = threading.local()

    @contextmanager
    def entered(self: Any) -> Iterator[None]:
        before, current.stream = getattr(current, "stream", ""), "ours"
        yield
        current.stream = before

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            inside.append(current.stream == "ours")
            return method(*given)

        return run

    def submit(self: Any, step: Any) -> Any:
        pending = submitted(self, step)
        inside.append(current.stream == "")
        return pending

    submitted = cuda_blocks.CudaExecutor.submit
    opened = {"target": "cuda", "trust": "code", "context": 64, "max_requests": 2, "memory": "1MiB"}
    with (
        patch.object(cuda_blocks._Interpreted, "entered", entered),
        patch.object(steps_module.CudaSteps, "_start", noting(steps_module.CudaSteps._start)),
        patch.object(steps_module._Started, "_finish", noting(steps_module._Started._finish)),
        patch.object(cuda_blocks.CudaExecutor, "submit", submit),
    ):
        with LLM(bundle, **opened) as llm:
            llm.generate([1, 2, 3], SamplingParams(max_tokens=2, logprobs=1))
        assert getattr(current, "stream", "") == ""
    held: list[weakref.ref[torch.Tensor]] = []

    def fails(program: Any, weights: dict[str, torch.Tensor], *given: Any, **options: Any) -> None:
        held.extend(weakref.ref(weight) for weight in weights.values())
        raise BundleError("a step has no kernel")

    def close(self: Any) -> None:
        done.append("closed" if not any(of() is not None for of in held) else "closed before its tensors went")

    with (
        patch.object(cuda_blocks, "CudaProgram", fails),
        patch.object(cuda_blocks._Interpreted, "close", close),
        pytest.raises(BundleError, match="has no kernel"),
    ):
        LLM(bundle, **opened)
    assert held
    return inside, done


@pytest.mark.matrix
def test_the_caller_s_stream_stays_and_a_failed_opening_gives_memory_back(
    bundle: Path, interpreter: ProcessPoolExecutor
) -> None:
    inside, done = interpreter.submit(in_its_stream, str(bundle)).result()
    assert inside == [True] * 6  # two steps
    assert done == ["closed"]
