"""The torch-tensorrt target's emitter."""

from __future__ import annotations

from enginewright.passes.framework.base import Pass
from enginewright.passes.ir.program import Program
from enginewright.runtime.bundle.manifest import TargetManifest, target_folder
from enginewright.runtime.shared.errors import MissingDependencyError, TargetError
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from ...doctor.examine import examine
from ...doctor.machine import look_at_machine
from ...emit.base import EmitOptions
from ...emit.bundle_writer import BundleWriter

NAME = "torch-tensorrt"
STEP_FILE = "step.pt2"
"""The name in the target's folder."""


class TorchTensorRtEmitter:
    """Has Torch-TensorRT compile the program, on the GPU that it will run on."""

    name = NAME

    def passes(self) -> list[Pass]:
        """Returns no passes: TensorRT fuses by itself."""
        return []

    def emit(
        self, program: Program, writer: BundleWriter, progress: Progress, options: EmitOptions = EmitOptions()
    ) -> TargetManifest:
        """Compiles the step and writes it. Engines depend on the machine: equal programs may give other bytes.

        Raises VerificationError if the compiled step differs from the program, and the errors of ``check_machine``.
        """
        check_machine()
        from .compile_step import compile_step  # needs torch_tensorrt

        progress(ProgressEvent("emit", 0, 1, self.name))
        scratch = writer.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        path = scratch / STEP_FILE
        compile_step(program, path)
        writer.adopt(f"{target_folder(self.name)}/{STEP_FILE}", path)
        progress(ProgressEvent("emit", 1, 1, self.name))
        return TargetManifest()


def check_machine() -> None:
    """Raises MissingDependencyError or TargetError that says all that this machine lacks to compile for the target."""
    (finding,) = examine(look_at_machine(), None, [NAME]).findings
    if finding.verdict == "runs":
        return
    message = f"target {NAME}: it can't be compiled on this machine: {'; '.join(finding.reasons)}"
    hint = "; ".join(one.removesuffix(".") for one in finding.todo) + "."
    if any("not installed" in reason for reason in finding.reasons):
        raise MissingDependencyError(message, hint=hint)
    raise TargetError(message, hint=hint)
