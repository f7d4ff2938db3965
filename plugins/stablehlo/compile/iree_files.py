"""Compiles modules with IREE's compiler, for levels of x86-64, and for CUDA without a GPU."""

from __future__ import annotations

import subprocess
from importlib import metadata, util
from pathlib import Path

from enginewright.plugins.steps.x86_levels import LEVELS, LevelName
from enginewright.runtime.shared.errors import MissingDependencyError, TargetError

from ..serve.iree_library import INSTALL

_HOST = "x86_64-unknown-linux-gnu"
_SAYS = 300
"""The most characters of the compiler's message that an error contains. The source that it compiled follows after
them.
"""


def compiler_version() -> str:
    """Returns the version of IREE's compiler. Raises MissingDependencyError if it isn't installed."""
    _compiler()
    return metadata.version("iree-base-compiler")


def compile_for_level(artifact: bytes, name: str, level: LevelName) -> bytes:
    """Compiles a portable artifact for a level of x86-64. ``name`` is the module's, for errors. Raises TargetError."""
    kind = LEVELS[level]
    options = [f"--iree-llvmcpu-target-triple={_HOST}", f"--iree-llvmcpu-target-cpu={kind.cpu}"]
    if kind.features:
        options.append(f"--iree-llvmcpu-target-cpu-features={','.join(kind.features)}")
    return _compile(artifact, f"{name} for x86-64-{level}", "llvm-cpu", options)


def compile_for_cuda(artifact: bytes, name: str, capability: str) -> bytes:
    """Compiles a portable artifact for a compute capability of NVIDIA GPUs. ``name`` is the module's. Raises
    TargetError.
    """
    options = [f"--iree-cuda-target={device_name(capability)}"]
    return _compile(artifact, f"{name} for CUDA {capability}", "cuda", options)


def device_name(capability: str) -> str:
    """Returns the compiler's name of a compute capability, "sm_90" for "9.0"."""
    return f"sm_{capability.replace('.', '')}"


def _compile(artifact: bytes, what: str, backend: str, options: list[str]) -> bytes:
    """Runs the compiler in its own process, on stdin and stdout, so that its output contains no file names. Raises
    TargetError.

    ``what`` is the subject of the error message.
    """
    chosen = ["--iree-input-type=stablehlo", f"--iree-hal-target-backends={backend}", "--iree-opt-level=O2", *options]
    done = subprocess.run([str(_compiler()), "-", *chosen, "-o", "-"], input=artifact, capture_output=True)
    if done.returncode != 0 or not done.stdout:
        lines = done.stderr.decode(errors="replace").splitlines()
        first = next((line for line in lines if "error" in line), f"it ended with {done.returncode}")
        raise TargetError(
            f"target stablehlo: IREE did not compile {what}: {first[:_SAYS]}",
            hint="Leave that out of iree or iree_cuda in [stablehlo] of the recipe.",
        )
    return done.stdout


def _compiler() -> Path:
    """Returns the path of IREE's compiler. Raises MissingDependencyError if it isn't installed."""
    spec = util.find_spec("iree.compiler") if util.find_spec("iree") is not None else None
    places = spec.submodule_search_locations if spec is not None else None
    program = Path(places[0], "_mlir_libs", "iree-compile") if places else None
    if program is None or not program.is_file():
        raise MissingDependencyError(
            "target stablehlo: iree in the recipe needs IREE's compiler (iree-base-compiler), which is not installed",
            hint=INSTALL,
        )
    return program
