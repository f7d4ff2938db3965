"""The tvm target: a lowered program of the cpu target's form, its weights, and libraries that TVM compiles for it."""

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
from enginewright.passes.memory.plan_arena import plan_arena
from enginewright.plugins.steps.x86_levels import LEVELS
from enginewright.runtime.bundle.manifest import TargetManifest, target_folder
from enginewright.runtime.bundle.reader import PROGRAM_FILE
from enginewright.runtime.shared.errors import MissingDependencyError
from enginewright.runtime.shared.lowered_program import Operand
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from ...emit.base import EmitOptions
from ...emit.bundle_writer import BundleWriter
from ...emit.weights import add_weight
from ..recipe import TvmOptions
from ..section import OURS, TvmSection, library_name
from ..serve.library import INSTALL, tvm_version


class TvmEmitter:
    """Writes targets/tvm/program.json, the weights that it reads, and a library for each level of processors."""

    name = "tvm"

    def passes(self) -> list[Pass]:
        """See ``Emitter.passes``."""
        return [FuseLinearResidual(), FuseRopeKvWrite()]

    def emit(
        self, program: Program, writer: BundleWriter, progress: Progress, options: EmitOptions = EmitOptions()
    ) -> TargetManifest:
        """See ``Emitter.emit``. Raises MissingDependencyError where TVM or a linker is missing, too."""
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
        planned, levels = lowering.program, options.section(TvmOptions).levels
        ours = OURS if options.section(TvmOptions).kernels else frozenset()
        modules = {name: step_module(planned, LEVELS[name], ours) for name in levels}
        for_gpus = [file for capability in options.section(TvmOptions).cuda for file in cuda_files(planned, capability)]
        total, folder = len(planned.weights), target_folder(self.name)
        progress(ProgressEvent("emit", 0, total))
        for done, use in enumerate(planned.weights, 1):
            add_weight(writer, use, lowering.weights[use.name])
            progress(ProgressEvent("emit", done, total, use.name))
        text = planned.to_json()
        writer.write_text(f"{folder}/{PROGRAM_FILE}", text)
        progress(ProgressEvent("kernels", 0, len(levels)))
        for done, name in enumerate(levels, 1):
            writer.write_bytes(f"{folder}/{library_name(name)}", compile_library(modules[name], LEVELS[name]))
            progress(ProgressEvent("kernels", done, len(levels), f"x86-64-{name}"))
        for file, data in for_gpus:
            writer.write_bytes(f"{folder}/{file}", data)
        section = TvmSection(
            version=version,
            levels=levels,
            program=hashlib.sha256(text.encode()).hexdigest(),
            kernels=options.section(TvmOptions).kernels,
            cuda=options.section(TvmOptions).cuda,
        )
        return TargetManifest(sections={"tvm": section})


def lower_for_tvm(program: Program) -> Lowering:
    """The program as the target runs it: memory planned, weights under names of their own.

    Raises what ``lower_program`` raises.
    """
    lowered = lower_program(program, Form("the tvm target"))
    planned = plan_arena(lowered.program)

    def named(operand: Operand) -> Operand:
        if operand.kind != "weight":
            return operand
        return operand.model_copy(update={"name": _own_name(operand.name)})

    steps = tuple(step.model_copy(update={"inputs": tuple(map(named, step.inputs))}) for step in planned.steps)
    uses = tuple(use.model_copy(update={"name": _own_name(use.name)}) for use in planned.weights)
    renamed = planned.model_copy(update={"steps": steps, "weights": uses})
    return replace(lowered, program=renamed, weights={_own_name(n): e for n, e in lowered.weights.items()})


def _own_name(name: str) -> str:
    """Of a weight: other targets may store it in other forms. Bytes that are the same are stored once."""
    return f"{name}.tvm"
