"""Compiles kernels for NVIDIA GPUs to files, without a GPU: TVM's CUDA source, and a cubin if nvcc is installed."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.target.codegen import llvm_get_intrinsic_name
from tvm.tirx.op import register_intrin_lowering

from enginewright.plugins.steps.x86_levels import Level
from enginewright.runtime.shared.errors import TargetError
from enginewright.runtime.shared.lowered_program import LoweredProgram

from .compile_library import HOST, build, linked
from .cuda_kernels import HANDLERS
from .step_function import step_module

GPU = Level("cuda", "", (), 1, 1, lanes=1, grid=True)
_FUNCTIONS = {"llvm.nearbyint": "rintf", "llvm.floor": "floorf"}
"""LLVM's functions that kernels call on a CPU -> CUDA's functions for them."""


def cuda_files(program: LoweredProgram, capability: str) -> Iterator[tuple[str, bytes]]:
    """Yields (file name, contents): the source, its cubin if nvcc is installed, and the library with ``step``, which
    launches the kernels.

    Raises UnsupportedModelError naming the first step without a kernel, TargetError with nvcc's error.
    """
    name = f"sm_{capability.replace('.', '')}"
    _teach_functions()
    module = step_module(program, GPU, handlers=HANDLERS)
    executable = build(module, tvm.target.Target({"kind": "cuda", "arch": name, "host": HOST}))
    source = next(part.inspect_source() for part in _parts(executable.mod) if part.kind == "cuda")
    yield f"kernels-{name}.cu", source.encode()
    if (nvcc := shutil.which("nvcc")) is not None:
        yield f"kernels-{name}.cubin", _cubin(nvcc, source, name)
    yield f"step-{name}.so", linked(executable)


@functools.cache
def _teach_functions() -> None:
    """Registers functions that TVM's generator of CUDA code lacks. It runs once, as TVM accepts each only once."""
    register_intrin_lowering("tirx.fma", target="cuda", f=lambda call: _call("fmaf", *call.args))
    register_intrin_lowering("tirx.call_llvm_pure_intrin", target="cuda", f=_of_llvm)


def _of_llvm(call: Any) -> Any:
    number, *arguments = call.args
    return _call(_FUNCTIONS[llvm_get_intrinsic_name(int(number))], *arguments)


def _call(function: str, *arguments: Any) -> Any:
    return tirx.call_pure_extern("float32", function, *arguments)


def _parts(module: Any) -> Iterator[Any]:
    yield module
    for part in module.imports:
        yield from _parts(part)


def _cubin(nvcc: str, source: str, name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernels.cu").write_text(source)
        command = [nvcc, "-w", "-O3", "-cubin", f"-arch={name}", "kernels.cu", "-o", "kernels.cubin"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise TargetError(
                f"target tvm: nvcc did not compile its kernels for {name}: {(done.stderr or done.stdout)[-600:]}",
                hint="Take a CUDA toolkit that knows this GPU, or another in the recipe's [tvm] cuda.",
            )
        return Path(folder, "kernels.cubin").read_bytes()
