"""Reads the properties of a machine that targets depend on: CPU, memory, GPUs, and libraries with their versions.

Large libraries aren't loaded: versions come from pip's metadata, and GPUs from the driver's own libraries. A target's
``serve.doctor`` adds its own: ``look(problems)`` returns fields of ``Machine``.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

from enginewright.runtime.shared.errors import EnginewrightError, TargetError
from enginewright.runtime.shared.memory import free_memory
from enginewright.runtime.shared.targets import OWN, part

from ..gpu.cuda_driver import InstalledGpu, load_cuda

PACKAGES = (
    *("enginewright", "jaxlib", "onnxruntime", "tensorrt", "tensorrt_rtx", "torch", "torch_tensorrt", "triton", "tvm"),
)
"""The packages that targets run on, by the name that Python imports."""

_NVML = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class Machine:
    """A machine's hardware and software, as far as targets depend on it.

    Attributes:
        system: the operating system and architecture, such as "Linux x86_64".
        processor: the processor's name.
        features: its instruction-set flags, with Linux's names; () if they aren't listed.
        instruction_sets: instruction sets of the cpu target's kernels that this processor runs, best first; () if the
            extension module can't be loaded.
        cores: the number of cores that this process may use.
        memory_bytes, free_bytes: bytes of memory, and those still free.
        python: the version of Python.
        packages: versions of the installed ones of ``PACKAGES``, and of IREE's runtime ("iree"), by name.
        providers: the execution providers of onnxruntime.
        onnx_operators: True if the library of our operators for onnxruntime is there.
        xla_handlers: True if the library of our handlers for XLA is there.
        pjrt_plugins: plugins of jaxlib that are installed besides its CPU client.
        cuda_of: the major version of CUDA that a package was built for, if the installed package's name has it
            (tensorrt_cu13).
        torch_cuda: the CUDA that torch was built for; "" if it has none, or isn't installed.
        driver: version of NVIDIA's driver; "" if there is none.
        cuda: the newest CUDA that the driver supports.
        gpus: NVIDIA's GPUs.
        gpu_problem: the reason why there are none; "" if there are.
        problems: the reason why a package can't be loaded, for those that were tried.
    """

    system: str
    processor: str
    instruction_sets: tuple[str, ...]
    cores: int
    memory_bytes: int
    free_bytes: int
    python: str
    features: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    providers: tuple[str, ...] = ()
    onnx_operators: bool = False
    xla_handlers: bool = False
    pjrt_plugins: tuple[str, ...] = ()
    cuda_of: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str = ""
    driver: str = ""
    cuda: str = ""
    gpus: tuple[InstalledGpu, ...] = ()
    gpu_problem: str = ""
    problems: Mapping[str, str] = field(default_factory=dict)


def look_at_machine() -> Machine:
    """Returns the properties of this machine; it takes a second or less."""
    problems: dict[str, str] = {}
    cuda, gpus, gpu_problem = _gpus()
    seen: dict[str, Any] = {}
    for name in OWN:
        look = getattr(part(name, "serve.doctor"), "look", None)
        seen |= {} if look is None else look(problems)
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        free_bytes=free_memory(),
        python=platform.python_version(),
        packages=_versions(),
        cuda_of=cuda_of([name for name in (d.metadata["Name"] for d in metadata.distributions()) if name]),
        torch_cuda=torch_cuda(),
        driver=driver_version(),
        cuda=cuda,
        gpus=gpus,
        gpu_problem=gpu_problem,
        problems=problems,
        **seen,
    )


def iree_version() -> str | None:
    """Returns the version of IREE's runtime; None if it isn't installed. The compiler is a package of its own."""
    try:
        return metadata.version("iree-base-runtime")
    except metadata.PackageNotFoundError:
        return None


def cuda_of(distributions: Iterable[str]) -> dict[str, str]:
    """Returns package -> major CUDA version, for distributions whose name ends with it: {"tensorrt_rtx": "13"} for
    "tensorrt_rtx_cu13".
    """
    named = (re.fullmatch(r"(tensorrt(?:_rtx)?)_cu(\d+)", name.replace("-", "_")) for name in distributions)
    return {match[1]: match[2] for match in named if match}


def torch_cuda(version_file: Path | None = None) -> str:
    """Returns the CUDA version of the installed torch from its version.py, because importing torch takes seconds."""
    if version_file is None:
        spec = util.find_spec("torch")
        if spec is None or spec.origin is None:
            return ""
        version_file = Path(spec.origin).parent / "version.py"
    try:
        match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", version_file.read_text(), re.M)
    except OSError:
        return ""
    return match[1] if match else ""


def driver_version(library: str = _NVML) -> str:
    """Returns the version of NVIDIA's driver, such as "580.95.05"; "" if NVML isn't installed or doesn't start."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return ""
    if nvml.nvmlInit_v2():
        return ""
    text = ctypes.create_string_buffer(96)
    status = nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
    nvml.nvmlShutdown()
    return "" if status else text.value.decode(errors="replace")


def _gpus() -> tuple[str, tuple[InstalledGpu, ...], str]:
    """Returns the newest CUDA version that the driver supports, the GPUs, and the reason why there are none."""
    try:
        cuda = load_cuda()
    except TargetError as e:
        return "", (), e.message
    except EnginewrightError as e:
        return "", (), f"NVIDIA's driver is there and doesn't answer: {e.message}"
    return cuda.version, cuda.gpus, "" if cuda.gpus else "there is an NVIDIA driver, and no GPU that it shows"


def _versions() -> dict[str, str]:
    """Returns the versions of the installed ones of ``PACKAGES``. It knows their other distributions, such as
    onnxruntime-gpu.
    """
    distributions = metadata.packages_distributions()
    versions = {}
    for name in PACKAGES:
        if util.find_spec(name) is None:
            continue
        try:
            versions[name] = metadata.version(next(iter(distributions.get(name, ())), name))
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    if (version := iree_version()) is not None:
        versions["iree"] = version
    return versions
