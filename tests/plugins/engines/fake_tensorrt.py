"""TensorRT in memory: engines are ONNX files that onnxruntime computes, so that results are right.

The fakes are as strict as the real ones are said to be: sizes must lie in the profile, a graph dies when its context is
bound anew, memory begins as garbage, and a capture only takes what has run once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime

from tests.plugins.gpu.fake_driver import STREAM, FakeCuda, FakeDevice
from tests.runtime.tensorrt_bundles import plan

SCRATCH_BYTES = 4096
_KINDS = {"tensor(int64)": "INT64", "tensor(int32)": "INT32", "tensor(bool)": "BOOL"}
_KINDS |= {"tensor(float)": "FLOAT", "tensor(float16)": "HALF", "tensor(int8)": "INT8", "tensor(uint8)": "UINT8"}


class _Mode(IntEnum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


@dataclass
class _Kind:
    name: str


class _Strategy(IntEnum):
    STATIC = 0
    USER_MANAGED = 2


class _Config:
    strategy = _Strategy.STATIC
    cuda_graph_strategy = 0
    dynamic_shapes_kernel_specialization_strategy = 0

    def set_execution_context_allocation_strategy(self, strategy: _Strategy) -> None:
        self.strategy = strategy


class _RtxConfig(_Config):
    """TensorRT-RTX's configuration. Its cache records the input sizes that were compiled."""

    cache: _RuntimeCache | None = None

    def create_runtime_cache(self) -> _RuntimeCache:
        return _RuntimeCache()

    def set_runtime_cache(self, cache: _RuntimeCache) -> bool:
        self.cache = cache
        return True


class _RuntimeCache:
    def __init__(self) -> None:
        self.kernels: set[str] = set()

    def deserialize(self, data: bytes) -> bool:
        fits = data.startswith(b"kernels ")
        self.kernels |= set(data[8:].decode().split()) if fits else set()
        return fits

    def serialize(self) -> bytes:
        return b"kernels " + " ".join(sorted(self.kernels)).encode()


COMPILED: list[str] = []
"""Kernels that were made, as no cache had them."""

Feeds = dict[str, np.ndarray]
Described = dict[str, tuple[str, tuple[int | str, ...]]]


@dataclass
class Model:
    """The computation of an engine: tensors, with TensorRT's types and letters for sizes, and a function.

    ``scratch``: bytes of memory that it needs; ``aliases``: outputs that must lie where an input lies.
    """

    inputs: Described
    outputs: Described
    compute: Callable[[Feeds], Feeds]
    scratch: int = SCRATCH_BYTES
    aliases: dict[str, str] = field(default_factory=dict)


def of_onnx(model: bytes) -> Model:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns of each cache that is not written in place
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # activations aren't rounded
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def described(values: Sequence[Any]) -> Described:
        return {value.name: (_KINDS[value.type], tuple(value.shape)) for value in values}

    def compute(feeds: Feeds) -> Feeds:
        return dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))

    return Model(described(session.get_inputs()), described(session.get_outputs()), compute)


MODELS: dict[bytes, Model] = {}
"""The models that plans with a name stand for."""


class _Engine:
    def __init__(self, cuda: FakeCuda, model: bytes, profiles: Sequence[Any], context: type[_Context]) -> None:
        self.cuda = cuda
        self.model = MODELS.get(model) or of_onnx(model)
        self.profiles = profiles
        self.inputs, self.outputs = self.model.inputs, self.model.outputs
        self.device_memory_size_v2 = self.model.scratch
        self.names = [*self.inputs, *self.outputs]
        self.num_io_tensors, self.num_optimization_profiles = len(self.names), len(profiles)
        self.context = context
        cuda.engines.add(self)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> _Mode:
        return _Mode.INPUT if name in self.inputs else _Mode.OUTPUT

    def get_tensor_dtype(self, name: str) -> _Kind:
        return _Kind((self.inputs | self.outputs)[name][0])

    def get_tensor_shape(self, name: str) -> list[int]:
        return [n if isinstance(n, int) else -1 for n in (self.inputs | self.outputs)[name][1]]

    def create_runtime_config(self) -> _Config:
        return _RtxConfig() if self.context is _RtxContext else _Config()

    def create_execution_context(self, config: _Config) -> _Context:
        assert config.strategy is _Strategy.USER_MANAGED
        return self.context(self, config)


class _Context:
    def __init__(self, engine: _Engine, config: _Config) -> None:
        self.engine, self.config = engine, config
        self.device.contexts.add(self)
        self.profile: Any = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.bound = 0  # how often something of it changed
        self.ran = -1
        self.scratch = 0

    @property
    def device(self) -> FakeDevice:
        return self.engine.cuda.devices[-1]

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        self.profile = self.engine.profiles[profile_index]
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        self.device.owned(memory, size)
        assert size >= self.engine.model.scratch
        self.scratch = memory

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.bound += 1
        self.shapes[name] = shape
        assert self.profile is not None
        for size, letter in zip(shape, self.engine.inputs[name][1], strict=True):
            if isinstance(letter, int):
                if letter != size:
                    return False
                continue
            sizes = getattr(self.profile, letter[0])
            low, high = (sizes, sizes) if isinstance(sizes, int) else (sizes[0], sizes[2])
            one_more = letter == "B + 1"
            if not low + one_more <= size <= high + one_more:
                return False
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.bound += 1
        self.addresses[name] = memory
        return name in self.engine.names

    def infer_shapes(self) -> list[str]:
        free = [name for name, (_, shape) in self.engine.inputs.items() if any(isinstance(n, str) for n in shape)]
        return [name for name in free if name not in self.shapes]

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == STREAM and self.scratch
        assert set(self.addresses) == set(self.engine.names)
        for name, of in self.engine.model.aliases.items():
            assert self.addresses[name] == self.addresses[of], f"{name} isn't where {of} is"
        bound = self.bound
        capturing = self.device.capturing is not None
        assert not capturing or self.ran == bound, "a capture before it ran once"
        assert not capturing or not self.config.cuda_graph_strategy, "a capture within a capture"

        def work() -> None:
            assert self.bound == bound, "its context was changed after the capture"
            self._compute()

        self.ran = bound
        self.device.put(work)
        return True

    def _compute(self) -> None:
        feeds = {}
        for name, (kind, shape) in self.engine.inputs.items():
            feeds[name] = self.device.view(self.addresses[name], _numpy(kind), self.shapes.get(name, shape))
        for name, value in self.engine.model.compute(feeds).items():
            self.device.owned(self.addresses[name], value.nbytes)
            ctypes.memmove(self.addresses[name], np.ascontiguousarray(value).ctypes.data, value.nbytes)


class _RtxContext(_Context):
    """TensorRT-RTX's execution context."""

    def is_stream_capturable(self, stream: int) -> bool:
        assert stream == STREAM
        return self.ran == self.bound

    def execute_async_v3(self, stream_handle: int) -> bool:
        kernel = repr((id(type(self)), sorted(self.shapes.items()))).replace(" ", "")
        cache = self.config.cache  # type: ignore[attr-defined]
        assert cache is not None, "kernels are compiled at each start"
        if kernel not in cache.kernels:
            COMPILED.append(kernel)
            cache.kernels.add(kernel)
        return super().execute_async_v3(stream_handle)


def _numpy(kind: str) -> np.dtype[Any]:
    if kind == "FP8":
        return np.dtype(ml_dtypes.float8_e4m3fn)
    return np.dtype(getattr(np, {"BOOL": "bool_", "FLOAT": "float32", "HALF": "float16"}.get(kind, kind.lower())))


def rtx_plan(model: bytes, mask: int = 0b1110) -> bytes:
    """An engine for the fake: a plan's header, followed by an ONNX file."""
    return plan(64 + len(model), mask=mask)[:64] + model


class _Logger:
    ERROR, WARNING = 1, 2

    def __init__(self) -> None:
        self.made = True


def fake_tensorrt(
    cuda: FakeCuda,
    profiles: Sequence[Any],
    *,
    name: str = "tensorrt_rtx",
    version: str = "1.7.1.116",
    refuses: str = "",
    graphs: bool = False,
) -> Any:
    """The module. ``refuses``: what it logs instead of loading an engine; ``graphs``: whether it captures by itself."""
    module: Any = ModuleType(name)
    module.__version__ = version
    module.ILogger = _Logger
    module.TensorIOMode = _Mode
    module.ExecutionContextAllocationStrategy = _Strategy
    context = _RtxContext if graphs else _Context
    module.IExecutionContext = context
    if graphs:
        module.CudaGraphStrategy = IntEnum("CudaGraphStrategy", {"DISABLED": 0, "WHOLE_GRAPH_CAPTURE": 1})
    loaded: list[bytes] = []

    class Runtime:
        def __init__(self, logger: Any) -> None:
            assert getattr(logger, "made", True)
            self.logger = logger

        def deserialize_cuda_engine(self, data: bytes) -> _Engine | None:
            assert cuda.devices and not cuda.devices[-1].closed, "there is no device yet"
            if refuses:
                self.logger.log(1, refuses)
                self.logger.log(2, "a warning")
                return None
            profile = profiles[len(loaded)] if isinstance(profiles, dict) else profiles
            loaded.append(data)
            return _Engine(cuda, data[64:], profile, context)

    module.Runtime = Runtime
    return module
