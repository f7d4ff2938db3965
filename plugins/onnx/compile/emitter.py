"""The onnx target's emitter."""

from __future__ import annotations

from enginewright.passes.framework.base import Pass
from enginewright.passes.ir.program import Program
from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.shared.errors import MissingDependencyError
from enginewright.runtime.shared.progress import Progress

from ...emit.base import EmitOptions
from ...emit.bundle_writer import BundleWriter
from ..kernels.library import operators_library
from ..recipe import OnnxSection


class OnnxEmitter:
    """Writes model.onnx, of standard operators, the variants that the recipe requests, and the weights of all, one by
    one.
    """

    name = "onnx"

    def passes(self) -> list[Pass]:
        """Returns no passes: onnxruntime and TensorRT fuse ops themselves."""
        return []

    def emit(
        self, program: Program, writer: BundleWriter, progress: Progress, options: EmitOptions = EmitOptions()
    ) -> TargetManifest:
        """Writes the standard file and its variants. Implements `Emitter.emit`.

        It also raises MissingDependencyError: if the package onnx is missing, or if the kernels variant is requested
        without its library, since the export runs every file.
        """
        if options.section(OnnxSection).kernels:
            operators_library()
        with MissingDependencyError.of(("onnx",), "target onnx: writing it", "onnx"):
            from ...graphs.emit_model import emit_model  # only this target needs the package
        contrib = options.context_length if options.section(OnnxSection).contrib else None
        kernels = options.context_length if options.section(OnnxSection).kernels else None
        narrow = options.section(OnnxSection).floats
        io = emit_model(program, writer, progress, contrib=contrib, kernels=kernels, narrow=narrow)
        return TargetManifest(sections={"io": io})
