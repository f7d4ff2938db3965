"""The description of this machine, and reading files that describe one."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from enginewright.plugins.doctor.machine import cuda_of, driver_version, look_at_machine, torch_cuda
from enginewright.plugins.native.executable import isas
from enginewright.plugins.native.processor import processor_name


def test_this_machine() -> None:
    machine = look_at_machine()
    assert machine.instruction_sets == tuple(isas())
    assert machine.packages["enginewright"] == metadata.version("enginewright")
    assert machine.packages["onnxruntime"] == metadata.version("onnxruntime")
    assert "CPUExecutionProvider" in machine.providers
    assert machine.onnx_operators and machine.xla_handlers
    assert 0 < machine.free_bytes <= machine.memory_bytes
    assert bool(machine.gpus) != bool(machine.gpu_problem)
    assert not machine.problems


def test_it_does_without_torch() -> None:
    probe = (
        "import sys; from enginewright.plugins.doctor.machine import look_at_machine; look_at_machine();"
        "print('torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "False"


def test_the_cuda_of_torch(tmp_path: Path) -> None:
    version = tmp_path / "version.py"
    for line, expected in (
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ('cuda = "12.9"', "12.9"),
        ("cuda: Optional[str] = None", ""),
        ("cuda_of_another = '1.0'", ""),
    ):
        version.write_text(f"__version__ = '2.13.0'\n{line}\n")
        assert torch_cuda(version) == expected
    assert torch_cuda(tmp_path / "missing.py") == ""


def test_the_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some Processor @ 2 GHz\n")
    assert processor_name(cpuinfo) == "Some Processor @ 2 GHz"
    assert processor_name(tmp_path / "missing")


def test_the_driver(tmp_path: Path) -> None:
    assert driver_version("libenginewright-has-no-such.so") == ""
    source = tmp_path / "nvml.c"
    source.write_text(
        "#include <string.h>\n"
        "int nvmlInit_v2(void) { return 0; }\n"
        "int nvmlShutdown(void) { return 0; }\n"
        'int nvmlSystemGetDriverVersion(char *to, unsigned size) { strncpy(to, "580.95.05", size); return 0; }\n'
    )
    library = tmp_path / "nvml.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert driver_version(str(library)) == "580.95.05"


def test_the_cuda_of_libraries() -> None:
    versions = cuda_of(["tensorrt", "tensorrt-cu13", "tensorrt_rtx_cu12", "tensorrt-cu13-bindings", "torch"])
    assert versions == {"tensorrt": "13", "tensorrt_rtx": "12"}
