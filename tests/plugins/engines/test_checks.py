from __future__ import annotations

import pytest

from enginewright.plugins.doctor.checks import choose_gpu, gpu_problem
from enginewright.plugins.engines.checks import FLAVOURS, build_problem, library_problem
from enginewright.plugins.gpu.cuda_driver import InstalledGpu
from enginewright.runtime.shared.errors import MissingDependencyError, TargetError

ADA, HOPPER = InstalledGpu(0, "RTX 4090", "8.9", 24 << 30), InstalledGpu(1, "H200", "9.0", 139 << 30)


@pytest.mark.parametrize("flavour", FLAVOURS.values(), ids=FLAVOURS.keys())
def test_libraries(flavour) -> None:
    missing = library_problem(flavour, None, "1.7.1.116")
    assert missing is not None
    assert missing.message == f"{flavour.name} is not installed; the engines were built by 1.7.1.116"
    assert f"{flavour.module}==1.7.1.116" in missing.hint
    assert isinstance(missing.error(), MissingDependencyError)
    for version in ("1.7.2.116", "1.8.0", "2.7.1.116"):
        other = library_problem(flavour, version, "1.7.1.116")
        assert other is not None
        assert isinstance(other.error(), TargetError)
        assert f"1.7.1.116, and {version} is installed" in other.message
    for version in ("1.7.1.116", "1.7.1.118", "1.7.1"):  # another build of it
        assert library_problem(flavour, version, "1.7.1.116") is None
    assert library_problem(flavour, "9.9.9", "") is None


def test_gpus() -> None:
    assert gpu_problem([ADA], "", ["8.6", "8.9"]) is None
    assert gpu_problem([HOPPER], "", []) is None
    assert choose_gpu([HOPPER, ADA], ["8.9"]) == ADA
    assert choose_gpu([HOPPER, ADA], []) == HOPPER
    none = gpu_problem([], "no driver", ["8.9"])
    assert none is not None
    assert none.message == "it needs an NVIDIA GPU of compute capability 8.9, and no driver"
    other = gpu_problem([HOPPER], "", ["8.0", "8.6", "8.9"])
    assert other is not None
    assert (
        other.message
        == "the engines are for compute capability 8.0, 8.6 or 8.9, and the GPU here is another: H200 (9.0)"
    )
    assert "--gpu 9.0" in other.hint


def test_libraries_that_build() -> None:
    flavour = FLAVOURS["tensorrt"]
    assert build_problem(flavour, "11.4.0.106", "11.0") is None
    missing = build_problem(flavour, None, "11.0")
    assert missing is not None
    assert isinstance(missing.error(), MissingDependencyError)
    assert "tensorrt>=11.0" in missing.hint
    old = build_problem(flavour, "10.14.1", "11.0")
    assert old is not None
    assert old.message == "building the engines needs TensorRT 11.0 or newer, and 10.14.1 is installed"
