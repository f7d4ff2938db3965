"""Kernels that a bundle carries, loaded: as machine code, else as PTX, else with the cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from enginewright.plugins.gpu.call import Call, DeviceArray
from enginewright.plugins.gpu.carried_kernels import CarriedKernels, assembler_of, resident_programs
from enginewright.plugins.gpu.compile_ahead import CompiledKernel, write_kernels
from enginewright.plugins.gpu.cuda_driver import InstalledGpu
from enginewright.plugins.gpu.tiles import GPUS, gpu_of
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError, TargetError

from .fake_driver import ADA, FakeDevice

_ARRAY = DeviceArray(256, np.dtype(np.float32), (4,))
CALL = Call("norm", {"x": _ARRAY, "out": _ARRAY}, {"SIZE": 4}, (1, 1, 1))
CUBIN = b"\x7fELF Cuda compilation tools, release 13.4, V13.4.59"


class Driver(FakeDevice):
    """Refuses code that begins as one of ``refused``."""

    def __init__(self, gpu: InstalledGpu, *refused: bytes, error: type[EnginewrightError] = EnginewrightError) -> None:
        super().__init__(gpu)
        self.refused, self.error = refused, error

    def load_kernel(self, code: bytes, entry: str, shared_memory: int) -> int:
        if code.startswith(self.refused):
            raise self.error(f"CUDA: cuModuleLoadData failed: {'PTX' if code[:1] == b'.' else 'IMAGE'}", hint="none")
        return super().load_kernel(code, entry, shared_memory)


def carried(folder: Path, capability: int, shared_memory: int = 64) -> None:
    spec = CALL.spec(capability)
    kernel = CompiledKernel(spec, "norm_kernel", ".version 8.4", CUBIN, shared_memory, "triton 3.9.0")
    write_kernels(folder, [replace(kernel, architecture=gpu_of(capability).architecture)])


@pytest.mark.parametrize(
    ("gpu", "capability", "refused", "code", "said"),
    [
        (ADA, 80, (), CUBIN, "1 as machine code"),
        (ADA, 89, (b"\x7fELF",), b".version 8.4", "1 as PTX"),
        (replace(ADA, capability="12.1"), 89, (), b".version 8.4", "1 as PTX"),  # machine code isn't tried
        (replace(ADA, capability="12.1"), 120, (), CUBIN, "1 as machine code"),  # it is for the family
        (replace(ADA, capability="9.0"), 90, (), CUBIN, "1 as machine code"),
    ],
)
def test_machine_code_is_loaded_or_else_ptx(
    gpu: InstalledGpu, capability: int, refused: tuple[bytes, ...], code: bytes, said: str, tmp_path: Path
) -> None:
    carried(tmp_path, capability)
    device = Driver(gpu, *refused)
    kernels = CarriedKernels(device, tmp_path, capability)  # type: ignore[arg-type]
    kernels.bind(CALL)
    kernels.bind(CALL)
    assert device.kernels == [(code, "norm_kernel")]
    assert kernels.loaded() == said


def test_a_driver_that_takes_neither_is_said(tmp_path: Path) -> None:
    carried(tmp_path, 90)
    kernels = CarriedKernels(Driver(replace(ADA, capability="9.0"), b"\x7fELF", b"."), tmp_path, 90)  # type: ignore[arg-type]
    with pytest.raises(
        TargetError, match=r"\.cubin: .*doesn't load it \(.*IMAGE\), nor its PTX \(.*PTX\)\n.*CUDA 13\.4"
    ):
        kernels.bind(CALL)


def test_memory_that_is_full_is_no_reason_for_ptx(tmp_path: Path) -> None:
    carried(tmp_path, 89)
    kernels = CarriedKernels(Driver(ADA, b"\x7fELF", error=CapacityError), tmp_path, 89)  # type: ignore[arg-type]
    with pytest.raises(CapacityError):
        kernels.bind(CALL)


def test_more_shared_memory_than_the_gpu_has_is_said_as_that(tmp_path: Path) -> None:
    carried(tmp_path, 80, 102400)
    kernels = CarriedKernels(Driver(ADA), tmp_path, 80)  # type: ignore[arg-type]
    with pytest.raises(
        TargetError, match=r"102,400 bytes of shared memory.* \(8\.9\) has 101,376 at most\n.*--gpu 8\.9"
    ):
        kernels.bind(CALL)


@pytest.mark.parametrize(
    ("capability", "shared_memory", "registers", "programs"),
    [
        (90, 71_680, 150, 3),  # a decode tile of heads of 128, as it is compiled
        (80, 71_680, 150, 2),
        (89, 37_888, 80, 2),
        (90, 20_000, 255, 2),
        (90, 8_000, 32, 4),
        (120, 101_376, 255, 1),
    ],
)
def test_as_many_programs_as_a_multiprocessor_holds(
    capability: int, shared_memory: int, registers: int, programs: int
) -> None:
    spec = CALL.spec(capability)
    kernel = CompiledKernel(spec, "", "", b"", shared_memory, "", registers)
    assert resident_programs(kernel, GPUS[capability]) == programs


def test_the_assembler_is_read_from_machine_code() -> None:
    assert assembler_of(CUBIN) == "13.4"
    assert assembler_of(b"\x7fELF") == ""
