"""A CUDA driver in memory: what would be put on its stream is done at once, and memory begins as garbage."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from enginewright.plugins.gpu.cuda_driver import Argument, InstalledGpu
from enginewright.runtime.shared.errors import CapacityError

ADA = InstalledGpu(0, "NVIDIA RTX 4090", "8.9", 1 << 30)
STREAM = 77

Kernel = Callable[["FakeDevice", bytes, tuple[int, int, int], Sequence[Argument]], None]
KERNELS: dict[str, Kernel] = {}
"""Kernels by entry name: the functions that launches run."""


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

    def __init__(self, gpu: InstalledGpu) -> None:
        self.gpu = gpu
        self.memory: dict[int, np.ndarray] = {}
        self.capturing: list[Callable[[], None]] | None = None
        self.launched = self.captured = self.pageable = 0
        self.closed = False
        self.contexts: WeakSet[Any] = WeakSet()
        self.downloaded: list[int] = []  # bytes, of each
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

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self.owned(to, nbytes)
        self.owned(source, nbytes)
        ctypes.memmove(to, source, nbytes)

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
        self.downloaded.append(array.nbytes)
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
        """Puts work on the stream."""
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

    def launcher(self, *given: Any) -> Callable[[], None]:
        return lambda: self.launch(*given)

    def enter(self) -> None:
        """Every thread may use it."""

    def empty(self) -> None:
        assert not self.contexts, "memory is freed under contexts"
        self.memory.clear()

    def close(self) -> None:
        self.empty()
        self.closed = True


class FakeCuda:
    version = "13.0"

    def __init__(self, gpus: Sequence[InstalledGpu] = (ADA,)) -> None:
        self.gpus = tuple(gpus)
        self.devices: list[FakeDevice] = []
        self.engines: WeakSet[Any] = WeakSet()

    def open(self, gpu: InstalledGpu) -> FakeDevice:
        self.devices.append(FakeDevice(gpu))
        return self.devices[-1]
