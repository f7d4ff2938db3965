"""Every call to the driver, against a library with its functions in C, whose memory is the process's own."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from enginewright.plugins.gpu.cuda_driver import InstalledGpu, load_cuda
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError, TargetError

SOURCE = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef uint64_t ptr;
static int context = 0, capturing = 0, invalid = 0, graphs = 0, blocks = 0, attribute = 0;
int cuInit(unsigned flags) { return flags + INIT; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = 10 + index; return index < 2 ? 0 : 101; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "GPU %d", device); return 0; }
int cuDeviceGetAttribute(int *value, int what, int device) {
    *value = what == 75 ? 8 : device - 4;
    return what == 75 || what == 76 ? 0 : 1;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)device << 32; return 0; }
int cuGetErrorName(int status, const char **name) {
    *name = status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : status == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : 0;
    return *name ? 0 : 1;
}
int cuDevicePrimaryCtxRetain(void **made, int device) { context++; *made = (void *)(intptr_t)device; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return --context == 0 && device == 11 ? 0 : 1; }
int cuCtxSetCurrent(void *context) { return (intptr_t)context == 11 ? 0 : 1; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = (void *)77; return flags == 1 ? 0 : 1; }
static int bad(void *stream) { return stream != (void *)77; }
int cuStreamDestroy_v2(void *stream) { return bad(stream); }
int cuStreamSynchronize(void *stream) {
    invalid = capturing;
    return capturing ? 900 : bad(stream);
}
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = 5ull << 32; *total = 11ull << 32; return 0; }
int cuMemAlloc_v2(ptr *address, size_t size) {
    if (size > 1 << 20) return 2;
    *address = (ptr)malloc(size);
    blocks++;
    return 0;
}
int cuMemAllocHost_v2(void **made, size_t size) { *made = malloc(size); blocks++; return 0; }
int cuMemFreeHost(void *memory) { free(memory); blocks--; return 0; }
int cuMemFree_v2(ptr address) { free((void *)address); blocks--; return 0; }
int cuMemsetD8Async(ptr to, unsigned char value, size_t n, void *s) { memset((void *)to, value, n); return bad(s); }
int cuMemcpyHtoDAsync_v2(ptr to, const void *from, size_t n, void *s) { memcpy((void *)to, from, n); return bad(s); }
int cuMemcpyDtoHAsync_v2(void *to, ptr from, size_t n, void *s) { memcpy(to, (void *)from, n); return bad(s); }
int cuStreamBeginCapture_v2(void *s, int mode) { capturing = 1; return mode == 1 ? bad(s) : 1; }
int cuStreamEndCapture(void *s, void **graph) {
    capturing = 0;
    *graph = invalid ? 0 : (void *)5;
    graphs += !invalid;
    if (invalid) return invalid = 0, 901;
    return bad(s);
}
int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) {
    *exec = (void *)6;
    return graph == (void *)5 && flags == 0 ? 0 : 1;
}
int cuGraphDestroy(void *graph) { return graph == (void *)5 && graphs-- ? 0 : 1; }
int cuGraphLaunch(void *exec, void *s) { return exec == (void *)6 ? bad(s) : 1; }
int cuGraphExecDestroy(void *exec) { return exec == (void *)6 ? 0 : 1; }
int cuModuleLoadData(void **module, const char *code) { *module = (void *)8; return strcmp(code, "code") ? 200 : 0; }
int cuModuleGetFunction(void **function, void *module, const char *entry) {
    *function = (void *)9;
    return strcmp(entry, "kernel") ? 500 : 0;
}
int cuModuleUnload(void *module) { return module == (void *)8 ? 0 : 1; }
int cuFuncSetAttribute(void *function, int what, int value) { attribute = value; return what == 8 ? 0 : 1; }
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *s, void **arguments, void **extra) {
    if (function != (void *)9 || extra || by != 1 || bz != 1 || (int)shared != attribute) return 1;
    if (x == 99) return 700;
    float *to = *(float **)arguments[0];
    to[0] = *(int32_t *)arguments[1] + *(float *)arguments[2];
    to[1] = x * 100 + y * 10 + z;
    to[2] = bx;
    return bad(s);
}
int blocks_left(void) { return blocks; }
int graphs_left(void) { return graphs; }
"""


def build(folder: Path, status: int = 0) -> str:
    source, library = folder / "cuda.c", folder / f"cuda{status}.so"
    source.write_text(SOURCE)
    command = ["gcc", "-shared", "-fPIC", f"-DINIT={status}", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return str(library)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("cuda"))


def test_gpus(library: str) -> None:
    cuda = load_cuda(library)
    assert cuda.version == "12.8"
    assert cuda.gpus == (InstalledGpu(0, "GPU 10", "8.6", 10 << 32), InstalledGpu(1, "GPU 11", "8.7", 11 << 32))


def test_a_driver_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="there is no NVIDIA driver here: libnone"):
        load_cuda("libnone.so.1")
    with pytest.raises(TargetError, match=r"doesn't start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH\n.*nvidia-smi"):
        load_cuda(build(tmp_path, 803))
    assert load_cuda(build(tmp_path, 100)).gpus == ()


def test_memory(library: str) -> None:
    cuda = load_cuda(library)
    device = cuda.open(cuda.gpus[1])
    assert device.stream == 77
    assert device.free_bytes() == 5 << 32
    address = device.allocate(48)
    values = np.arange(12, dtype=np.float32)
    device.upload(address, values)
    device.zero(address + 4, 8)
    read_back = np.empty_like(values)
    device.download(read_back, address)
    np.testing.assert_array_equal(read_back, np.r_[0, 0, 0, values[3:]])
    pinned = device.pinned(48)
    pinned[:] = np.arange(48)
    device.upload_pinned(address, pinned[:48])
    device.download(read_back, address)
    assert read_back.tobytes() == bytes(range(48))
    with pytest.raises(CapacityError, match="the GPU's memory is full"):
        device.allocate(1 << 30)
    device.free(device.allocate(0))
    device.empty()
    assert ctypes.CDLL(library).blocks_left() == 0
    device.enter()
    device.upload(device.allocate(48), values)  # it can be used again, on the same stream
    device.close()
    assert ctypes.CDLL(library).blocks_left() == 0
    with pytest.raises(EnginewrightError, match="cuDeviceGet failed: error 101"):
        cuda.open(InstalledGpu(2, "none", "8.0", 0))


def test_graphs(library: str) -> None:
    cuda = load_cuda(library)
    device = cuda.open(cuda.gpus[1])
    with pytest.raises(EnginewrightError, match="cuStreamSynchronize failed: error 900"):
        device.capture(device.synchronize)  # and not that ending the capture fails then
    with pytest.raises(ZeroDivisionError):
        device.capture(lambda: 1 / 0)
    ran: list[int] = []
    graph = device.capture(lambda: ran.append(1))
    assert ran == [1]
    graph.launch()
    graph.close()
    assert ctypes.CDLL(library).graphs_left() == 0
    device.close()


def test_kernels(library: str) -> None:
    cuda = load_cuda(library)
    device = cuda.open(cuda.gpus[1])
    kernel = device.load_kernel(b"code", "kernel", 4096)
    address = device.allocate(12)
    device.launch(kernel, (1, 2, 3), 128, 4096, (address, np.int32(-40), np.float32(0.5)))
    result = np.empty(3, np.float32)
    device.download(result, address)
    assert result.tolist() == [-39.5, 123, 128]
    again = device.launcher(kernel, (3, 2, 1), 64, 4096, (address, np.int32(7), np.float32(0.25)))
    for _ in range(2):
        device.zero(address, 12)
        again()
        device.download(result, address)
        assert result.tolist() == [7.25, 321, 64]
    with pytest.raises(EnginewrightError, match=r"cuLaunchKernel failed: CUDA_ERROR_ILLEGAL_ADDRESS\n.*start again"):
        device.launch(kernel, (99, 1, 1), 128, 4096, (address, np.int32(0), np.float32(0)))
    with pytest.raises(EnginewrightError, match="cuModuleGetFunction failed"):
        device.load_kernel(b"code", "other", 0)
    device.close()
