"""The emitter of the tvm target: a lowered program of the cpu target's form, its weights, and libraries that TVM
compiles.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import replace

from enginewright.passes.framework.base import Pass
from enginewright.passes.fusion.fuse_linear_residual import FuseLinearResidual
from enginewright.passes.fusion.fuse_rope_kv_write import FuseRopeKvWrite
from enginewright.passes.ir.program import Program
from enginewright.passes.lowering.builder import Form
from enginewright.passes.lowering.lower_program import Lowering, lower_program
from enginewright.plugins.steps.x86_levels import LEVELS
from enginewright.runtime.bundle.manifest import TargetManifest, target_folder
from enginewright.runtime.shared.arena import plan_arena
from enginewright.runtime.shared.errors import MissingDependencyError
from enginewright.runtime.shared.hidden_taps import add_taps
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from ...emit.base import EmitOptions
from ...emit.bundle_writer import BundleWriter
from ...emit.lowered_files import with_own_names, write_lowered
from ..recipe import TvmOptions
from ..section import OURS, TvmSection, library_name
from ..serve.library import INSTALL, tvm_version


class TvmEmitter:
    """Writes targets/tvm/program.json, the weights that it reads, and a library for each level of x86-64."""

    name = "tvm"

    def passes(self) -> list[Pass]:
        """Returns the target's own passes, in order."""
        return [FuseLinearResidual(), FuseRopeKvWrite()]

    def emit(
        self, program: Program, writer: BundleWriter, progress: Progress, options: EmitOptions = EmitOptions()
    ) -> TargetManifest:
        """Writes the lowered program, its weights and libraries. Implements `Emitter.emit`.

        It also raises MissingDependencyError if TVM or a linker is missing.
        """
        version = tvm_version()
        if version is None or importlib.util.find_spec("tvm") is None:
            raise MissingDependencyError(
                f"target {self.name}: compiling it needs TVM (apache-tvm), which is not installed", hint=INSTALL
            )
        from .compile_library import compile_library, linker  # only this target needs the package
        from .cuda_files import cuda_files
        from .step_function import step_module

        linker()
        lowering = lower_for_tvm(program)
        table = options.section(TvmOptions)
        ours = OURS if table.kernels else frozenset()
        modules = {name: step_module(lowering.program, LEVELS[name], ours) for name in table.levels}
        for_gpus = [file for capability in table.cuda for file in cuda_files(lowering.program, capability)]
        folder = target_folder(self.name)
        text = write_lowered(lowering, self.name, writer, progress)
        progress(ProgressEvent("kernels", 0, len(table.levels)))
        for done, name in enumerate(table.levels, 1):
            writer.write_bytes(f"{folder}/{library_name(name)}", compile_library(modules[name], LEVELS[name]))
            progress(ProgressEvent("kernels", done, len(table.levels), f"x86-64-{name}"))
        for file, data in for_gpus:
            writer.write_bytes(f"{folder}/{file}", data)
        section = TvmSection(
            version=version,
            levels=table.levels,
            program=hashlib.sha256(text.encode()).hexdigest(),
            kernels=table.kernels,
            cuda=table.cuda,
        )
        return TargetManifest(sections={"tvm": section})


def lower_for_tvm(program: Program) -> Lowering:
    """Lowers a program for the tvm target, plans its memory, and gives its weights names of their own.

    Raises the errors of ``lower_program``.
    """
    lowering = lower_program(program, Form("the tvm target"))
    return with_own_names(replace(lowering, program=plan_arena(add_taps(lowering.program))), "tvm")
