"""The tensorrt-rtx target's emitter."""

from __future__ import annotations

import importlib.util

from enginewright.passes.attention.round_kv_cache import RoundKvCache
from enginewright.passes.framework.base import Pass
from enginewright.passes.ir.program import Program
from enginewright.passes.quantization.dequantize_tables import DequantizeTables
from enginewright.passes.quantization.requantize_offsets import RequantizeOffsets
from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.shared.errors import MissingDependencyError
from enginewright.runtime.shared.kv_formats import SCALED_CACHES
from enginewright.runtime.shared.progress import Progress

from ...emit.base import EmitOptions
from ...emit.bundle_writer import BundleWriter
from ...engines.gpus import DEFAULT, check_suited
from ...gpu.formats import check_formats


class TensorRtRtxEmitter:
    """Builds engines, on a machine without a GPU, from the ONNX graph of the program."""

    name = "tensorrt-rtx"

    def passes(self) -> list[Pass]:
        """Returns the target's own passes. TensorRT fuses by itself; it gathers floats alone, and needs no offsets of
        int4."""
        return [RoundKvCache(SCALED_CACHES), DequantizeTables(), RequantizeOffsets()]

    def emit(
        self, program: Program, writer: BundleWriter, progress: Progress, options: EmitOptions = EmitOptions()
    ) -> TargetManifest:
        """Writes the engines, or segments with kernels between them. Implements `Emitter.emit`.

        Raises MissingDependencyError if tensorrt_rtx or onnx are missing, too.
        """
        capabilities = options.engines.gpus or DEFAULT
        check_suited(capabilities)
        check_formats(capabilities, ((options.engines.dtype or "f16"),))
        for package in ("onnx", "tensorrt_rtx"):
            if importlib.util.find_spec(package) is None:
                raise MissingDependencyError(
                    f"target {self.name}: building engines needs {package}, which is not installed",
                    hint="Install it with: pip install 'enginewright[tensorrt-rtx]' (Linux on x86-64).",
                )
        if options.engines.form == "segments":
            if importlib.util.find_spec("triton") is None:
                raise MissingDependencyError(
                    f"target {self.name}: compiling what attends between segments needs triton, which is not installed",
                    hint="Install it with: pip install 'enginewright[triton]'.",
                )
            from .emit_segments import emit_segments

            return emit_segments(program, writer, progress, options, capabilities)
        from .whole import emit_whole  # only this target needs the packages

        return emit_whole(program, writer, progress, options, capabilities)
