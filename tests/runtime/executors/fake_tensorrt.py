"""A CUDA driver and TensorRT in memory: engines are ONNX files that onnxruntime computes, so that results are right.

The fakes are as strict as the real ones are said to be: sizes must lie in the profile, a graph dies when its context is
bound anew, memory begins as garbage, and a capture only takes what has run once.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType
from typing import Any
from weakref import WeakSet

import numpy as np
import onnxruntime

from enginewright.plugins.shared.errors import CapacityError
from enginewright.runtime.executors.cuda_driver import Argument, Gpu
from tests.runtime.tensorrt_bundles import plan

ADA = Gpu(0, "NVIDIA RTX 4090", "8.9", 1 << 30)
STREAM, SCRATCH_BYTES = 77, 4096
_KINDS = {"tensor(int64)": "INT64", "tensor(int32)": "INT32", "tensor(bool)": "BOOL"}
_KINDS |= {"tensor(float)": "FLOAT", "tensor(float16)": "HALF", "tensor(int8)": "INT8", "tensor(uint8)": "UINT8"}


Kernel = Callable[["FakeDevice", bytes, tuple[int, int, int], Sequence[Argument]], None]
KERNELS: dict[str, Kernel] = {}
"""What launches of kernels of that entry do."""


class FakeGraph:
    def __init__(self, device: FakeDevice, work: list[Callable[[], None]]) -> None:
        self._device, self._work = device, work

    def launch(self) -> None:
        self._device.launched += 1
        for one in self._work:
            one()

    def close(self) -> None:
        self._work.clear()


class FakeDevice:
    """Memory is the process's own; what would be put on the stream is done at once."""

    stream = STREAM

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.memory: dict[int, np.ndarray] = {}
        self.capturing: list[Callable[[], None]] | None = None
        self.launched = self.captured = self.pageable = 0
        self.closed = False
        self.contexts: WeakSet[_Context] = WeakSet()
        self.copying: list[tuple[np.ndarray, bytes]] = []  # pinned memory that the stream may still read, as it was
        self.kernels: list[tuple[bytes, str]] = []

    def free_bytes(self) -> int:
        return self.gpu.memory_bytes - sum(len(array) for array in self.memory.values())

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.free_bytes():
            raise CapacityError("the GPU's memory is full")
        array = np.full(max(nbytes, 1), 0xFF, np.uint8)  # NaN
        self.memory[array.ctypes.data] = array
        return int(array.ctypes.data)

    def free(self, address: int) -> None:
        del self.memory[address]

    def owned(self, address: int, nbytes: int) -> None:
        inside = any(a <= address and address + nbytes <= a + len(m) for a, m in self.memory.items())
        assert inside, f"{nbytes} bytes at {address} are not the device's"

    def zero(self, address: int, nbytes: int) -> None:
        self.owned(address, nbytes)
        ctypes.memset(address, 0, nbytes)

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.full(max(nbytes, 1), 0xFF, np.uint8)

    def upload_pinned(self, address: int, array: np.ndarray) -> None:
        self.copying.append((array, array.tobytes()))
        self.upload(address, array)
        self.pageable -= 1

    def upload(self, address: int, array: np.ndarray) -> None:
        self.pageable += 1
        self.owned(address, array.nbytes)
        assert array.flags.c_contiguous
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, array: np.ndarray, address: int) -> None:
        self.owned(address, array.nbytes)
        ctypes.memmove(array.ctypes.data, address, array.nbytes)
        self.synchronize()

    def view(self, address: int, dtype: np.dtype[Any], shape: Sequence[int]) -> np.ndarray:
        nbytes = math.prod(shape) * dtype.itemsize
        self.owned(address, nbytes)
        return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype).reshape(shape)

    def synchronize(self) -> None:
        assert self.capturing is None
        for array, before in self.copying:
            assert array.tobytes() == before, "pinned memory was written before it had been copied"
        self.copying.clear()

    def put(self, work: Callable[[], None]) -> None:
        """On the stream."""
        if self.capturing is None:
            work()
        else:
            self.capturing.append(work)

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        self.capturing = []
        try:
            work()
        except BaseException:
            self.capturing = None
            raise
        graph = FakeGraph(self, self.capturing)
        self.capturing = None
        self.captured += 1
        return graph

    def load_kernel(self, code: bytes, entry: str, shared_memory: int) -> int:
        self.kernels.append((code, entry))
        return len(self.kernels)

    def launch(
        self, kernel: int, grid: tuple[int, int, int], threads: int, shared_memory: int, arguments: Sequence[Argument]
    ) -> None:
        assert min(grid) > 0 and threads > 0
        code, entry = self.kernels[kernel - 1]
        self.put(lambda: KERNELS[entry](self, code, grid, arguments))

    def close(self) -> None:
        assert not self.contexts, "memory is freed under contexts"
        self.memory.clear()
        self.closed = True


class FakeCuda:
    version = "13.0"

    def __init__(self, gpus: Sequence[Gpu] = (ADA,)) -> None:
        self.gpus = tuple(gpus)
        self.devices: list[FakeDevice] = []
        self.engines: WeakSet[_Engine] = WeakSet()

    def open(self, gpu: Gpu) -> FakeDevice:
        self.devices.append(FakeDevice(gpu))
        return self.devices[-1]


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


Feeds = dict[str, np.ndarray]
Described = dict[str, tuple[str, tuple[int | str, ...]]]


@dataclass
class Model:
    """What an engine computes: its tensors, with types as TensorRT calls them and letters for sizes, and a function.

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
"""What plans that hold a name stand for."""


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
        return _Config()

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
    """As TensorRT-RTX has it."""

    def is_stream_capturable(self, stream: int) -> bool:
        assert stream == STREAM
        return self.ran == self.bound


def _numpy(kind: str) -> np.dtype[Any]:
    return np.dtype(getattr(np, {"BOOL": "bool_", "FLOAT": "float32", "HALF": "float16"}.get(kind, kind.lower())))


def rtx_plan(model: bytes, mask: int = 0b1110) -> bytes:
    """What the fake takes for an engine: a plan's header, and an ONNX file behind it."""
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
            own = profiles[len(loaded)] if isinstance(profiles, dict) else profiles
            loaded.append(data)
            return _Engine(cuda, data[64:], own, context)

    module.Runtime = Runtime
    return module
