"""Compiles a step's function and kernels ahead of time to a shared library. The same program gives the same bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import tvm
from tvm import relax, tirx
from tvm.support import cc

from enginewright.plugins.steps.x86_levels import Level
from enginewright.runtime.shared.errors import MissingDependencyError, TargetError

_LOOPS = "enginewright"
HOST = {"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu"}
"""TVM's description of the system on which libraries run."""


def compile_library(module: tvm.IRModule, level: Level) -> bytes:
    """Returns the bytes of the module's library. Raises MissingDependencyError without a linker, TargetError with the
    linker's error.
    """
    options = {"mcpu": level.cpu, "mattr": list(level.features), "opt-level": 3}
    return linked(build(module, tvm.target.Target(HOST | options)))


def build(module: tvm.IRModule, target: tvm.target.Target) -> relax.VMExecutable:
    with tvm.transform.PassContext(opt_level=3):
        return relax.build(module, target, relax_pipeline=_pipeline(), tir_pipeline=_LOOPS)


def _pipeline() -> tvm.transform.Pass:
    """Returns TVM's passes for the step's function, which turn calls into instructions of its virtual machine. They
    neither fuse nor plan memory.
    """
    return tvm.transform.Sequential(
        [
            relax.transform.RemovePurityChecking(),
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.ComputePrimValue(),
            relax.transform.VMShapeLower(),
            relax.transform.AttachGlobalSymbol(),
        ]
    )


def _loops() -> tuple[tvm.transform.Pass, tvm.transform.Pass, tvm.transform.Pass]:
    """Returns TVM's passes for kernels, which only lower arguments and threads: kernels are already scheduled."""
    lower = tirx.transform
    passes = tvm.transform.Sequential(
        [
            tvm.s_tir.transform.LowerOpaqueBlock(),
            lower.FlattenBuffer(),
            lower.AnnotateEntryFunc(),
            lower.SplitHostDevice(),
            lower.MakePackedAPI(),
        ]
    )
    host = tvm.transform.Sequential([lower.LowerTVMBuiltin(), lower.LowerIntrin()])
    return passes, lambda: host, lambda: host


tirx.register_tir_pipeline(_LOOPS, _loops)


def linker() -> str:
    """Returns the path of the C compiler that links libraries. Raises MissingDependencyError if there is none."""
    compiler: str | None = cc.get_cc()
    if compiler is None:
        raise MissingDependencyError(
            "target tvm: linking its library needs a compiler of C, and none was found",
            hint="Install gcc or clang, or name one in the variable CC.",
        )
    return compiler


def linked(executable: relax.VMExecutable) -> bytes:
    """Links an executable of TVM's virtual machine, and returns the library's bytes. Raises the errors of
    ``compile_library``.
    """
    compiler = linker()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.so"
        try:
            executable.export_library(
                str(path), workspace_dir=folder, options=["-shared", "-Wl,--build-id=none", "-s"], cc=compiler
            )
        except RuntimeError as e:
            raise TargetError(f"target tvm: {compiler} did not link its library: {e}") from e
        return path.read_bytes()
