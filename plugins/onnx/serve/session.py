"""Loads onnxruntime, checks its version, and opens sessions on its execution providers.

Only this module loads onnxruntime, when a session is opened. Sessions have every option set that matters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from enginewright.plugins.doctor.checks import is_older
from enginewright.runtime.shared.errors import (
    BundleError,
    CapacityError,
    EnginewrightError,
    MissingDependencyError,
    RequestError,
)

from ...steps.linear_io import AccuracyLevel
from ..kernels.library import MOST_THREADS

OLDEST = "1.25.0"
"""The oldest release whose CPU provider runs opset 24 as bundles need it: 1.24 has no kernel for TensorScatter."""

_INSTALL = "Install it with: pip install 'enginewright[onnx]'"
_OUT_OF_MEMORY = re.compile(r"alloc|out of memory", re.IGNORECASE)


@dataclass(frozen=True)
class Provider:
    """An execution provider of onnxruntime.

    Attributes:
        full_name: its name in onnxruntime.
        package: the package that has to be installed in place of onnxruntime.
        device: onnxruntime's name of the device for caches. It is "cpu" also if the provider's memory has no usable
            address; then each step copies the caches there and back.
    """

    full_name: str
    package: str
    device: str = "cpu"


PROVIDERS: Mapping[str, Provider] = {
    "cpu": Provider("CPUExecutionProvider", "onnxruntime"),
    "cuda": Provider("CUDAExecutionProvider", "onnxruntime-gpu", "cuda"),
    "tensorrt-rtx": Provider("NvTensorRTRTXExecutionProvider", "onnxruntime-trt-rtx", "cuda"),
    "directml": Provider("DmlExecutionProvider", "onnxruntime-directml"),
    "openvino": Provider("OpenVINOExecutionProvider", "onnxruntime-openvino"),
}
"""The execution providers, by the names that ``LLM(provider=...)`` uses. Tests have run only "cpu"."""

_EXTRAS = {"cuda": " (pip uninstall onnxruntime, then pip install 'enginewright[onnx-gpu]')"}


def load_onnxruntime(smallest: str = OLDEST) -> ModuleType:
    """Returns the module onnxruntime. Raises MissingDependencyError if it is missing, or older than ``smallest``."""
    try:
        module = import_module("onnxruntime")
    except ImportError as e:
        raise MissingDependencyError(
            f"onnxruntime, which target 'onnx' runs on, can't be loaded: {e}", hint=_INSTALL
        ) from e
    version = str(module.__version__)
    if is_older(version, smallest):
        raise MissingDependencyError(
            f"target 'onnx' needs onnxruntime {smallest} or newer, for opset 24, and {version} is installed",
            hint=f"Install a newer one: pip install 'onnxruntime>={smallest}'",
        )
    return module


def find_provider(name: str, module: ModuleType) -> Provider:
    """Returns the provider with this name.

    Raises:
        RequestError: there is none of that name.
        MissingDependencyError: this onnxruntime was built without it; lists the available ones.
    """
    if name not in PROVIDERS:
        raise RequestError(f"provider: there is no {name!r}", hint=f"Take one of {', '.join(PROVIDERS)}.")
    provider, there = PROVIDERS[name], module.get_available_providers()
    if provider.full_name not in there:
        known = [short for short, one in PROVIDERS.items() if one.full_name in there]
        raise MissingDependencyError(
            f"provider: onnxruntime {module.__version__} here has no {provider.full_name}; it has {', '.join(there)}",
            hint=f"Install {provider.package} in the place of onnxruntime{_EXTRAS.get(name, '')}, or take provider "
            f"{' or '.join(known)}.",
        )
    return provider


def open_session(
    path: Path,
    provider: Provider,
    threads: int,
    module: ModuleType,
    accuracy_level: AccuracyLevel = 1,
    operators: Path | None = None,
) -> Any:
    """Opens an ``onnxruntime.InferenceSession`` on one provider. The CPU provider runs ops that it lacks.

    ``accuracy_level``: see ``LinearIo``. ``operators``: the library with the file's custom operators; None if it has
    none.

    Raises:
        BundleError: the file can't be read, is damaged, or needs another onnxruntime.
        CapacityError: there isn't enough memory.
        MissingDependencyError: the provider can't start (a driver or library is missing), or the library of operators
            can't be loaded.
    """
    names = list(dict.fromkeys([provider.full_name, PROVIDERS["cpu"].full_name]))
    try:
        options = _options(module, threads, accuracy_level)
        if operators is not None:
            _register(options, operators, threads, module)
        session = module.InferenceSession(str(path), options, providers=names)
    except _errors(module) as e:
        if _OUT_OF_MEMORY.search(str(e)):
            raise CapacityError(f"{path}: no memory to load it: {_first_line(e)}", hint="Free some memory.") from e
        raise BundleError(
            f"{path}: onnxruntime {module.__version__} can't load it: {_first_line(e)}",
            hint="Run `optimize verify` on the bundle: it finds files that were damaged; or export it again.",
        ) from e
    used = session.get_providers()
    if provider.full_name not in used:  # onnxruntime falls back to the CPU, and says so in its log alone
        raise MissingDependencyError(
            f"provider: {provider.full_name} is installed and doesn't start; onnxruntime took {', '.join(used)}",
            hint="Its driver or libraries are missing or too old: see onnxruntime's documentation of this provider.",
        )
    return session


def run_session(session: Any, binding: Any, options: Any, module: ModuleType) -> None:
    """Runs a session with its inputs and outputs bound.

    Raises CapacityError if memory runs out, EnginewrightError for other failures.
    """
    try:
        session.run_with_iobinding(binding, options)
    except _errors(module) as e:
        if _OUT_OF_MEMORY.search(str(e)):
            raise CapacityError(
                f"onnxruntime: no memory for a step of this size: {_first_line(e)}",
                hint="Run fewer tokens in a step (prefill_chunk), or make slots smaller (context).",
            ) from e
        raise EnginewrightError(f"onnxruntime: a step failed: {_first_line(e)}") from e


def run_options(module: ModuleType) -> Any:
    """Returns run options with which the memory arena shrinks after the run."""
    options = module.RunOptions()
    options.log_severity_level = 3
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def _options(module: ModuleType, threads: int, accuracy_level: AccuracyLevel = 1) -> Any:
    """Returns session options that set everything that changes numbers, memory or threads."""
    options = module.SessionOptions()
    options.log_severity_level = 3  # errors, which are raised as well
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = module.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = module.GraphOptimizationLevel.ORT_ENABLE_ALL
    # Steps come in all sizes: a plan of memory for each would be kept.
    options.enable_mem_pattern = False
    options.enable_cpu_mem_arena = True
    for key, value in {
        # Of products with weights of 4 bits. Left alone, activations are rounded to 8 bits.
        "session.qdq_matmulnbits_accuracy_level": str(accuracy_level),
        "optimization.enable_gelu_approximation": "0",
        # Weights stay out of the arena, which grows by doubling.
        "session.use_device_allocator_for_initializers": "1",
        "session.intra_op.allow_spinning": "1",
    }.items():
        options.add_session_config_entry(key, value)
    return options


def _register(options: Any, operators: Path, threads: int, module: ModuleType) -> None:
    """Adds a library's operators to session options; they use ``threads`` threads. Raises MissingDependencyError."""
    options.add_session_config_entry("enginewright.threads", str(min(threads, MOST_THREADS)))
    try:
        options.register_custom_ops_library(str(operators))
    except _errors(module) as e:
        raise MissingDependencyError(
            f"{operators}: onnxruntime {module.__version__} can't load these operators: {_first_line(e)}",
            hint="Install enginewright again: pip install --force-reinstall enginewright",
        ) from e


def _errors(module: ModuleType) -> tuple[type[BaseException], ...]:
    """Returns the classes of onnxruntime's exceptions, which have no common base below Exception."""
    state = import_module(f"{module.__name__}.capi.onnxruntime_pybind11_state")
    classes = [v for v in vars(state).values() if isinstance(v, type) and issubclass(v, Exception)]
    return (*classes, RuntimeError, ValueError, OSError)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
