"""Loads and launches the compiled kernels that a bundle contains. It doesn't need torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from enginewright.plugins.gpu.tiles import number_of
from enginewright.runtime.bundle.regular_file import MOST_TEXT_BYTES, read_regular
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError, TargetError

from .call import Call
from .compile_ahead import THREADS_OF_WARP, CompiledKernel, read_kernel
from .cuda_driver import Argument, Device
from .tiles import GPUS, GpuLimits, machine_code_runs


def read_by_stem(folder: Path, stem: str) -> CompiledKernel:
    """Reads a kernel of a bundle, without PTX. ``stem`` is its files' name without suffix.

    Raises BundleError if it is missing, damaged, or differs from its name.
    """
    return read_kernel(folder, stem, read=partial(read_regular, most=MOST_TEXT_BYTES), with_ptx=False)


CUBIN, PTX = "machine code", "PTX"
"""The two kinds of code that a driver loads: machine code for one kind of GPU, and PTX, which the driver translates."""


def load_carried(device: Device, folder: Path, kernel: CompiledKernel) -> tuple[int, str]:
    """Loads a kernel. Returns its handle, and ``CUBIN`` or ``PTX``, which is used if the driver rejects the machine
    code.

    Args:
        device: the GPU.
        folder: the folder of the kernels.
        kernel: the result of ``read_by_stem``.

    Raises:
        BundleError: the PTX is damaged.
        CapacityError: memory ran out.
        TargetError: the GPU can't run the kernel; the message has the reason.
    """
    gpu, spec = device.gpu, kernel.spec
    path, number = folder / f"{spec.stem}.cubin", number_of(gpu.capability)
    if number in GPUS and kernel.shared_memory > (most := GPUS[number].shared_memory):
        raise TargetError(
            f"{path}: it takes {kernel.shared_memory:,} bytes of shared memory, and a block of {gpu.name} "
            f"({gpu.capability}) has {most:,} at most",
            hint=f"Export again with --gpu {gpu.capability}.",
        )
    why = f"it is for compute capability {spec.capability / 10}, and {gpu.name} has {gpu.capability}"
    if machine_code_runs(spec.capability, number, family=kernel.for_family):
        try:
            return device.load_kernel(kernel.cubin, kernel.entry, kernel.shared_memory), CUBIN
        except CapacityError:
            raise
        except EnginewrightError as e:
            why = e.message
    read = partial(read_regular, most=MOST_TEXT_BYTES)
    code = read_kernel(folder, spec.stem, read=read).ptx.encode()
    try:
        return device.load_kernel(code, kernel.entry, kernel.shared_memory), PTX
    except CapacityError:
        raise
    except EnginewrightError as e:
        by = assembler_of(kernel.cubin)
        raise TargetError(
            f"{path}: the driver doesn't load it ({why}), nor its PTX ({e.message})",
            hint=f"Install a newer driver of NVIDIA's: the kernel was made by {kernel.compiler}"
            f"{f' for CUDA {by}' if by else ''}.",
        ) from e


def assembler_of(cubin: bytes) -> str:
    """Returns the CUDA version of the assembler that made a cubin, such as "13.4"; "" if the cubin doesn't contain
    it.
    """
    match = re.search(rb"Cuda compilation tools, release (\d{1,3}\.\d{1,3})", cubin)
    return "" if match is None else match[1].decode()


_REGISTERS, _MOST_RESIDENT = 65536, 4
"""The number of 32-bit registers of a multiprocessor, and the most programs of it that process a list together."""


def resident_programs(kernel: CompiledKernel, gpu: GpuLimits) -> int:
    """Returns the number of thread blocks of a kernel that a multiprocessor can hold at a time, by shared memory and
    registers; at most 4.

    CUDA reserves 1 KiB of shared memory for each block. A multiprocessor has that much more than one block may use. A
    warp's registers are allocated in multiples of 256.
    """
    by_memory = (gpu.shared_memory + 1024) // (kernel.shared_memory + 1024)
    a_warp = -(-max(kernel.registers, 1) * THREADS_OF_WARP // 256) * 256
    by_registers = _REGISTERS // (a_warp * kernel.spec.warps)
    return max(1, min(by_memory, by_registers, _MOST_RESIDENT))


class CarriedKernels:
    """Launches the kernels of a bundle on a GPU's stream.

    Args:
        device: the GPU; None if kernels are only read, not launched.
        folder: the folder of the kernels.
        capability: the compute capability for which they were compiled; 90 for 9.0.

    Attributes:
        forms: the numbers of kernels that were loaded as ``CUBIN`` and as ``PTX``.

    ``bind`` raises BundleError for a kernel that is missing or damaged, and the errors of ``load_carried``.
    """

    def __init__(self, device: Device | None, folder: Path, capability: int) -> None:
        self._device, self._folder, self._capability = device, folder, capability
        self._loaded: dict[str, int] = {}
        self._read: dict[str, CompiledKernel] = {}
        self.forms: Counter[str] = Counter()

    def loaded(self) -> str:
        """A text with the numbers of loaded kernels, such as "31 as machine code, 2 as PTX"."""
        return ", ".join(f"{count} as {form}" for form, count in sorted(self.forms.items(), reverse=True))

    def resident(self, call: Call) -> int:
        """Returns the number of programs of a call's kernel that a multiprocessor runs at a time.

        Raises BundleError if the kernel is missing or damaged.
        """
        number = self._capability if self._device is None else number_of(self._device.gpu.capability)
        return resident_programs(self._kernel(call), GPUS[number if number in GPUS else self._capability])

    def bind(self, call: Call) -> Callable[[], object]:
        assert self._device is not None
        kernel = self._kernel(call)
        stem = kernel.spec.stem
        if stem not in self._loaded:
            self._loaded[stem], form = load_carried(self._device, self._folder, kernel)
            self.forms[form] += 1
            self._read[stem] = replace(kernel, cubin=b"")
        arguments: list[Argument] = [
            np.int32(value) if isinstance(value, int) else value.data_ptr()
            for value in call.arguments.values()
            if value is not None
        ]
        sizes = call.grid, kernel.threads, kernel.shared_memory
        return self._device.launcher(self._loaded[stem], *sizes, arguments)

    def _kernel(self, call: Call) -> CompiledKernel:
        """Returns the bundle's kernel for a call. It is read from its files the first time."""
        stem = call.spec(self._capability).stem
        if stem not in self._read:
            self._read[stem] = read_by_stem(self._folder, stem)
        return self._read[stem]
