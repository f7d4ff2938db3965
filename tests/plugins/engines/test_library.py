"""The library as it is: TensorRT-RTX has everything that is called of it, and what it logs comes out in errors."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from enginewright.plugins.engines.api import ContextApi, EngineApi
from enginewright.plugins.engines.checks import FLAVOURS
from enginewright.plugins.engines.library import (
    Engine,
    Library,
    check_tensors,
    open_library,
)
from enginewright.plugins.engines.section import TensorRtSection
from enginewright.runtime.shared.errors import BundleError, EnginewrightError, MissingDependencyError
from tests.plugins.gpu.fake_driver import ADA, FakeCuda
from tests.plugins.steps import tiny_onnx as tiny

from .fake_tensorrt import SCRATCH_BYTES, fake_tensorrt, rtx_plan
from .test_slots import PROFILES


def test_everything_that_is_called_is_there() -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="pip install 'enginewright[tensorrt-rtx]'")
    for protocol, real in ((EngineApi, trt.ICudaEngine), (ContextApi, trt.IExecutionContext)):
        names = {name for name in vars(protocol) if not name.startswith("_")}
        assert len(names) > 4
        assert names <= set(dir(real))
    config = {"set_execution_context_allocation_strategy", "cuda_graph_strategy", "create_runtime_cache"}
    config |= {"set_runtime_cache", "dynamic_shapes_kernel_specialization_strategy"}
    assert config <= set(dir(trt.IRuntimeConfig))
    assert {"serialize", "deserialize"} <= set(dir(trt.IRuntimeCache))
    assert "is_stream_capturable" in dir(trt.IExecutionContext)
    assert trt.DynamicShapesKernelSpecializationStrategy.EAGER
    assert trt.CudaGraphStrategy.DISABLED
    assert trt.ExecutionContextAllocationStrategy.USER_MANAGED
    assert trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    assert trt.ILogger.INTERNAL_ERROR <= trt.ILogger.ERROR < trt.ILogger.WARNING


def test_what_it_logs_is_said(tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="pip install 'enginewright[tensorrt-rtx]'")
    library = Library(FLAVOURS["rtx"], trt, FakeCuda(), ADA)
    assert library.captures_itself
    path = tmp_path / "bad.plan"
    path.write_bytes(rtx_plan(b"x" * 1000))
    with pytest.raises(BundleError, match=rf"bad.plan: TensorRT-RTX {trt.__version__} can't load .*: IRuntime"):
        library.load_engine(path)
    assert library.said() == ""
    with pytest.raises(BundleError, match=r"none.plan: cannot be read: No such file"):
        library.load_engine(tmp_path / "none.plan")


def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "tensorrt_rtx"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libtensorrt_rtx.so.1: cannot open shared object file')\n")
    monkeypatch.delitem(sys.modules, "tensorrt_rtx", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    section = TensorRtSection(flavour="rtx", version="1.7.1.116", compute_capabilities=("8.9",))
    with pytest.raises(MissingDependencyError, match=r"here: TensorRT-RTX is installed and doesn't load: libtensorrt"):
        open_library(section, "here")


@pytest.fixture
def engine(tmp_path: Path) -> tuple[Engine, FakeCuda]:
    cuda = FakeCuda()
    module = fake_tensorrt(cuda, PROFILES)
    module.__spec__ = ModuleSpec("tensorrt_rtx", None)
    cuda.open(ADA)
    path = tmp_path / "tiny.plan"
    path.write_bytes(rtx_plan(tiny.make_model().SerializeToString()))
    return Library(FLAVOURS["rtx"], module, cuda, ADA).load_engine(path), cuda


def test_tensors(engine: tuple[Engine, FakeCuda]) -> None:
    opened, _ = engine
    assert opened.profiles == 2
    assert opened.scratch_bytes == SCRATCH_BYTES
    assert opened.tensors["input_ids"].shape == (-1, -1)
    assert opened.tensors["past_key_0"].shape == (-1, tiny.NKV, -1, tiny.D)
    assert opened.tensors["logits"].dtype == "float32" and not opened.tensors["logits"].is_input
    inputs = [name for name, tensor in opened.tensors.items() if tensor.is_input]
    outputs = [name for name, tensor in opened.tensors.items() if not tensor.is_input]
    check_tensors(opened, inputs, outputs)
    check_tensors(opened, inputs[1:], outputs, inputs[:1])
    with pytest.raises(BundleError, match=r"tiny.plan: .* it lacks other and has mask of which it says nothing"):
        check_tensors(opened, [*(name for name in inputs if name != "mask"), "other"], outputs)


def test_sizes_that_a_profile_does_not_hold(engine: tuple[Engine, FakeCuda]) -> None:
    opened, cuda = engine
    device = cuda.devices[-1]
    context = opened.context(0, device, device.allocate(SCRATCH_BYTES))
    with pytest.raises(EnginewrightError, match=r"refuses shape \[9, 1\] of input_ids"):
        context.bind({"input_ids": (9, 1)}, {})
    with pytest.raises(EnginewrightError, match="refuses a step: it isn't given position_ids"):
        context.bind({"input_ids": (8, 1)}, {})
