"""The tensorrt-rtx target's emitter."""

from __future__ import annotations

from enginewright.passes.ir.program import Program
from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.shared.progress import Progress

from ...emit.base import EmitOptions
from ...emit.bundle_writer import BundleWriter
from ...engines.emitter import EnginesEmitter
from ...engines.gpus import DEFAULT, check_suited
from ...gpu.formats import check_formats


class TensorRtRtxEmitter(EnginesEmitter):
    """Builds engines on a machine without a GPU, from the ONNX graph of the program."""

    name = "tensorrt-rtx"

    def emit(
        self, program: Program, writer: BundleWriter, progress: Progress, options: EmitOptions = EmitOptions()
    ) -> TargetManifest:
        """Writes engines of the whole model, or segments with kernels between them. Implements `Emitter.emit`.

        It also raises MissingDependencyError if tensorrt_rtx or onnx is missing.
        """
        capabilities = options.engines.gpus or DEFAULT
        check_suited(capabilities)
        check_formats(capabilities, ((options.engines.dtype or "f16"),))
        self.check_packages(
            ("onnx", "tensorrt_rtx"),
            "building engines",
            "Install it with: pip install 'enginewright[tensorrt-rtx]' (Linux on x86-64).",
        )
        if options.engines.form == "segments":
            self.check_packages(
                ("triton",),
                "compiling what attends between segments",
                "Install it with: pip install 'enginewright[triton]'.",
            )
            from .emit_segments import emit_segments

            return emit_segments(program, writer, progress, options, capabilities)
        from .whole import emit_whole  # only this target needs the packages

        return emit_whole(program, writer, progress, options, capabilities)
