"""Kernels that a bundle carries: code that was compiled ahead, read by the name of what it is for. Without torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from enginewright.plugins.shared.errors import EnginewrightError, TargetError
from enginewright.plugins.triton.call import Call
from enginewright.plugins.triton.compile_ahead import CompiledKernel, read_kernel
from enginewright.runtime.bundle.regular_file import MOST_TEXT_BYTES, read_regular

from .cuda_driver import Argument, Device


def read_by_stem(folder: Path, stem: str) -> CompiledKernel:
    """A kernel of a bundle. Raises BundleError where it is missing, damaged, or isn't what its name says."""
    return read_kernel(folder, stem, read=partial(read_regular, most=MOST_TEXT_BYTES), with_ptx=False)


class CarriedKernels:
    """Launches the kernels of a bundle on a GPU's stream.

    Args:
        device: the GPU.
        folder: with the kernels.
        capability: what they were compiled for; 90 is 9.0.

    ``bind`` raises BundleError for a kernel that is missing or damaged, and TargetError where the driver refuses one.
    """

    def __init__(self, device: Device, folder: Path, capability: int) -> None:
        self._device, self._folder, self._capability = device, folder, capability
        self._loaded: dict[str, tuple[int, int, int]] = {}

    def bind(self, call: Call) -> Callable[[], object]:
        spec = call.spec(self._capability)
        if spec.stem not in self._loaded:
            kernel = read_by_stem(self._folder, spec.stem)
            try:
                handle = self._device.load_kernel(kernel.cubin, kernel.entry, kernel.shared_memory)
            except EnginewrightError as e:
                raise TargetError(
                    f"{self._folder / spec.stem}.cubin: the driver doesn't load it: {e.message}",
                    hint=f"Install a newer driver of NVIDIA's: the kernel was made by {kernel.compiler}.",
                ) from e
            self._loaded[spec.stem] = handle, kernel.threads, kernel.shared_memory
        handle, threads, shared = self._loaded[spec.stem]
        arguments: list[Argument] = [
            np.int32(value) if isinstance(value, int) else value.data_ptr()
            for value in call.arguments.values()
            if value is not None
        ]
        return lambda: self._device.launch(handle, call.grid, threads, shared, arguments)
