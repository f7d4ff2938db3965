"""The stablehlo target's emitter."""

from __future__ import annotations

from enginewright.passes.framework.base import Pass
from enginewright.passes.ir.program import Program
from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.shared.errors import MissingDependencyError
from enginewright.runtime.shared.progress import Progress

from ...emit.base import EmitOptions
from ...emit.bundle_writer import BundleWriter
from ..recipe import StableHloOptions
from ..section import BLOCK
from .sizes import modules_of


class StableHloEmitter:
    """Writes a module for each bucket into targets/stablehlo/modules, and the weights into the bundle."""

    name = "stablehlo"

    def passes(self) -> list[Pass]:
        """Returns no passes: XLA and IREE fuse ops themselves."""
        return []

    def emit(
        self, program: Program, writer: BundleWriter, progress: Progress, options: EmitOptions = EmitOptions()
    ) -> TargetManifest:
        """Writes the modules of all sizes. Implements `Emitter.emit`.

        It also raises MissingDependencyError if jaxlib, onnx or IREE isn't installed.
        """
        table = options.section(StableHloOptions)
        block = BLOCK if table.kernels else 1
        modules = modules_of(options.engines, options.context_length, options.buckets, block)
        with MissingDependencyError.of(("onnx",), f"target {self.name}: writing it", "stablehlo"):
            from .emit_modules import emit_modules  # only few targets need the package
        section = emit_modules(program, modules, options.context_length, writer, progress, table)
        return TargetManifest(sections={"stablehlo": section})
