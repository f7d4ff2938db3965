"""Loads machine code and launches it by the CUDA driver's own functions, as a program without Triton would."""

from __future__ import annotations

import ctypes

import torch

from enginewright.plugins.gpu.compile_ahead import CompiledKernel
from enginewright.plugins.gpu.plugin_kernels import Launch

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # of CUfunction_attribute


def launch(kernel: CompiledKernel, code: bytes, run: Launch[int], tensors: dict[str, torch.Tensor]) -> None:
    """Runs ``code`` (PTX, ended by a zero byte, or a cubin) with ``tensors`` by the kernel's names of its arguments."""
    driver = ctypes.CDLL("libcuda.so.1")
    torch.cuda.current_stream().synchronize()  # makes torch's context, which is the driver's current one
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), code))
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, kernel.entry.encode()))
    _check(driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, run.shared_memory))
    integers = iter(run.integers)
    arguments = [
        ctypes.c_int32(next(integers)) if of == "i32" else ctypes.c_void_p(tensors[name].data_ptr())
        for name, of in kernel.spec.arguments
    ]
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.cast(ctypes.byref(a), ctypes.c_void_p) for a in arguments))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _check(driver.cuLaunchKernel(function, *run.grid, run.threads, 1, 1, run.shared_memory, stream, pointers, None))
    torch.cuda.synchronize()
    _check(driver.cuModuleUnload(module))


def _check(status: int) -> None:
    assert status == 0, f"the CUDA driver answered {status}"
