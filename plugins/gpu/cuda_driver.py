"""Calls the CUDA driver through ctypes: lists GPUs, and gives access to the memory, stream, graphs and kernels of one
GPU.

The library (libcuda.so.1) comes with NVIDIA's driver, so nothing else must be installed. No other module calls CUDA.
Code that runs engines uses the protocols here, and is tested with a fake driver.

Functions and numbers: CUDA Driver API, version 12 and later. Names that end in _v2 are those to which cuda.h maps the
names without it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.errors import CapacityError, EnginewrightError, TargetError

LIBRARY = "libcuda.so.1"

_OUT_OF_MEMORY, _NO_DEVICE = 2, 100  # of CUresult
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # of CUdevice_attribute
_THREAD_LOCAL = 1  # of CUstreamCaptureMode: what other threads do doesn't end a capture
_DYNAMIC_SHARED_MEMORY = 8  # of CUfunction_attribute
_NON_BLOCKING = 1  # of CUstream_flags

Argument = int | np.int32 | np.float32
"""An argument of a kernel: an address (int), or a 32-bit number."""


@dataclass(frozen=True)
class InstalledGpu:
    """A GPU of this machine. ``capability`` is a text such as "8.9"; ``memory_bytes`` is its total memory."""

    index: int
    name: str
    capability: str
    memory_bytes: int


class Graph(Protocol):
    """Captured work that is launched as a whole. It uses the addresses that it used when it was captured."""

    def launch(self) -> None:
        """Queues the graph on the device's stream."""

    def close(self) -> None:
        """Frees the graph."""


class Device(Protocol):
    """An open GPU with one stream, on which all work runs in order.

    Only the thread that opened it, or that called ``enter`` last, may use it. All methods raise CapacityError if memory
    runs out, and EnginewrightError for other errors of the driver.
    """

    @property
    def gpu(self) -> InstalledGpu:
        """The GPU."""

    @property
    def stream(self) -> int:
        """The stream's handle, for TensorRT."""

    def free_bytes(self) -> int:
        """Returns the bytes of free memory."""

    def allocate(self, nbytes: int) -> int:
        """Allocates uninitialized memory of ``nbytes`` bytes, and returns its address."""

    def free(self, address: int) -> None:
        """Frees the memory at an address that ``allocate`` returned."""

    def zero(self, address: int, nbytes: int) -> None:
        """Sets bytes to zero."""

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Queues a copy within this device's memory on the stream."""

    def upload(self, address: int, array: npt.NDArray[Any]) -> None:
        """Copies a contiguous array to an address on the device. The array may change when this has returned."""

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocates memory of the host for ``upload_pinned``. It is freed when the device is closed."""

    def upload_pinned(self, address: int, array: npt.NDArray[np.uint8]) -> None:
        """Queues a copy from ``pinned`` memory to an address on the device. The memory must not change until the stream
        has executed the copy.
        """

    def download(self, array: npt.NDArray[Any], address: int) -> None:
        """Copies device memory into a contiguous array, after all earlier work of the stream."""

    def synchronize(self) -> None:
        """Waits until the stream has finished its work."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Captures the work that ``work`` queues on the stream as a graph, without running it."""

    def load_kernel(self, code: bytes, entry: str, shared_memory: int) -> int:
        """Loads the kernel ``entry`` from a cubin or PTX, and returns its handle. Launches may use ``shared_memory``
        bytes.
        """

    def launch(
        self, kernel: int, grid: tuple[int, int, int], threads: int, shared_memory: int, arguments: Sequence[Argument]
    ) -> None:
        """Queues a kernel on the stream, in blocks of ``threads`` threads along x."""

    def launcher(
        self, kernel: int, grid: tuple[int, int, int], threads: int, shared_memory: int, arguments: Sequence[Argument]
    ) -> Callable[[], None]:
        """Returns a function that launches a kernel with these arguments. Calling it is faster than ``launch``."""

    def enter(self) -> None:
        """Makes the calling thread the one that may use the device."""

    def empty(self) -> None:
        """Frees all memory and kernels. The stream stays, and the device can still be used."""

    def close(self) -> None:
        """Frees all memory, kernels and the stream."""


class Cuda(Protocol):
    """The CUDA driver of this machine."""

    @property
    def version(self) -> str:
        """The newest CUDA version that the driver supports, such as "13.0"."""

    @property
    def gpus(self) -> tuple[InstalledGpu, ...]:
        """The GPUs in the driver's order, without those that CUDA_VISIBLE_DEVICES hides."""

    def open(self, gpu: InstalledGpu) -> Device:
        """Opens a GPU for the calling thread."""


def load_cuda(library: str = LIBRARY) -> Cuda:
    """Loads this machine's CUDA driver. Raises TargetError if there is none, or if it can't start."""
    try:
        functions = ctypes.CDLL(library)
    except OSError as e:
        raise TargetError(
            f"there is no NVIDIA driver here: {e}",
            hint=f"Install NVIDIA's driver, which has {library}; in a container, start it with the GPUs "
            "(docker run --gpus all).",
        ) from e
    return _Cuda(functions)


class _Cuda:
    def __init__(self, functions: ctypes.CDLL) -> None:
        self._call = _Calls(functions)
        status = functions.cuInit(0)
        if status not in (0, _NO_DEVICE):
            raise TargetError(
                f"NVIDIA's driver doesn't start: {self._call.name_of(status)}",
                hint="Run `nvidia-smi`: the driver's kernel module may be missing, or of another version.",
            )
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        self.version = f"{number.value // 1000}.{number.value % 1000 // 10}"
        count = ctypes.c_int()
        if status == 0:
            self._call("cuDeviceGetCount", ctypes.byref(count))
        self.gpus = tuple(self._gpu(index) for index in range(count.value))

    def open(self, gpu: InstalledGpu) -> Device:
        return _Device(self._call, gpu)

    def _gpu(self, index: int) -> InstalledGpu:
        device = _device(self._call, index)
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, ctypes.c_int(len(name)), device)
        numbers = [ctypes.c_int(), ctypes.c_int()]
        for number, attribute in zip(numbers, (_CAPABILITY_MAJOR, _CAPABILITY_MINOR), strict=True):
            self._call("cuDeviceGetAttribute", ctypes.byref(number), ctypes.c_int(attribute), device)
        memory = ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        capability = ".".join(str(number.value) for number in numbers)
        return InstalledGpu(index, name.value.decode(errors="replace"), capability, memory.value)


class _Calls:
    """Calls the driver's functions by name, and raises an error if one returns another status than 0."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        self._functions = functions

    def __call__(self, function: str, *arguments: Any) -> None:
        status = getattr(self._functions, function)(*arguments)
        if status == _OUT_OF_MEMORY:
            raise CapacityError("the GPU's memory is full", hint="Pass less memory, or a smaller context.")
        if status:
            raise EnginewrightError(
                f"CUDA: {function} failed: {self.name_of(status)}",
                hint="After an error of a kernel a process can't use the GPU any more: start again.",
            )

    def name_of(self, status: int) -> str:
        name = ctypes.c_char_p()
        if self._functions.cuGetErrorName(status, ctypes.byref(name)) or name.value is None:
            return f"error {status}"
        return name.value.decode()


def _device(call: _Calls, index: int) -> ctypes.c_int:
    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    return device


class _Device:
    """Implements ``Device`` with the GPU's primary context, which TensorRT uses too."""

    def __init__(self, call: _Calls, gpu: InstalledGpu) -> None:
        self._call = call
        self.gpu = gpu
        self._device = _device(call, gpu.index)
        self._context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self.enter()
        call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        self._stream = stream
        self._allocated: set[int] = set()
        self._modules: list[ctypes.c_void_p] = []
        self._pinned: list[ctypes.c_void_p] = []

    @property
    def stream(self) -> int:
        return self._stream.value or 0

    def enter(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        self._allocated.add(address.value)
        return address.value

    def free(self, address: int) -> None:
        self._allocated.remove(address)
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def zero(self, address: int, nbytes: int) -> None:
        self._call(
            "cuMemsetD8Async", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(nbytes), self._stream
        )

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self._call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(to),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            self._stream,
        )

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        memory, size = ctypes.c_void_p(), max(nbytes, 1)
        self._call("cuMemAllocHost_v2", ctypes.byref(memory), ctypes.c_size_t(size))
        assert memory.value is not None
        self._pinned.append(memory)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(memory.value))

    def upload_pinned(self, address: int, array: npt.NDArray[np.uint8]) -> None:
        self.upload(address, array)  # of memory that is locked, the copy is made when the stream comes to it

    def upload(self, address: int, array: npt.NDArray[Any]) -> None:
        assert array.flags.c_contiguous
        # From memory that isn't locked the driver takes a copy before it returns.
        self._call(
            "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(address),
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_size_t(array.nbytes),
            self._stream,
        )

    def download(self, array: npt.NDArray[Any], address: int) -> None:
        assert array.flags.c_contiguous
        self._call(
            "cuMemcpyDtoHAsync_v2",
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_uint64(address),
            ctypes.c_size_t(array.nbytes),
            self._stream,
        )
        self.synchronize()

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self._stream)

    def capture(self, work: Callable[[], None]) -> Graph:
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", self._stream, ctypes.c_int(_THREAD_LOCAL))
        try:
            work()
        except BaseException:  # a stream that captures can do nothing else; ending it fails too where work() did
            with suppress(EnginewrightError):
                self._call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
            if graph:
                self._call("cuGraphDestroy", graph)
            raise
        self._call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        try:
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
        finally:
            self._call("cuGraphDestroy", graph)
        return _Graph(self._call, executable, self._stream)

    def load_kernel(self, code: bytes, entry: str, shared_memory: int) -> int:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(code))
        self._modules.append(module)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(entry.encode()))
        self._call("cuFuncSetAttribute", function, ctypes.c_int(_DYNAMIC_SHARED_MEMORY), ctypes.c_int(shared_memory))
        return function.value or 0

    def launch(
        self, kernel: int, grid: tuple[int, int, int], threads: int, shared_memory: int, arguments: Sequence[Argument]
    ) -> None:
        self.launcher(kernel, grid, threads, shared_memory, arguments)()

    def launcher(
        self, kernel: int, grid: tuple[int, int, int], threads: int, shared_memory: int, arguments: Sequence[Argument]
    ) -> Callable[[], None]:
        values = [_c_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = [ctypes.c_uint(n) for n in (*grid, threads, 1, 1, shared_memory)]
        parameters = (ctypes.c_void_p(kernel), *sizes, self._stream, pointers, None)

        def launch(kept: object = values) -> None:  # ``pointers`` point into it
            self._call("cuLaunchKernel", *parameters)

        return launch

    def empty(self) -> None:
        self.synchronize()
        for address in list(self._allocated):
            self.free(address)
        while self._pinned:
            self._call("cuMemFreeHost", self._pinned.pop())
        while self._modules:
            self._call("cuModuleUnload", self._modules.pop())

    def close(self) -> None:
        self.empty()
        self._call("cuStreamDestroy_v2", self._stream)
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)


def cache_budget(gpu: str, free: int, what: str, used: int, share: float) -> int:
    """Returns the default bytes for KV caches: a share of the free memory that is left after other uses.

    Args:
        gpu: the GPU's name, for the message.
        free: the free bytes of its memory.
        what: the other uses of memory, such as weights, for the message.
        used: the bytes that these need.
        share: the share of the rest, from 0 to 1.

    Raises:
        CapacityError: nothing is left.
    """
    if free <= used:
        raise CapacityError(
            f"memory: {gpu} has {free:,} bytes free, and {what} alone need {used:,}",
            hint="End what else uses the GPU, or take a larger one.",
        )
    return int((free - used) * share)


def _c_value(argument: Argument) -> ctypes.c_uint64 | ctypes.c_int32 | ctypes.c_float:
    if isinstance(argument, np.int32):
        return ctypes.c_int32(int(argument))
    if isinstance(argument, np.float32):
        return ctypes.c_float(float(argument))
    return ctypes.c_uint64(argument)


class _Graph:
    def __init__(self, call: _Calls, executable: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        self._call, self._executable, self._stream = call, executable, stream

    def launch(self) -> None:
        self._call("cuGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        self._call("cuGraphExecDestroy", self._executable)
