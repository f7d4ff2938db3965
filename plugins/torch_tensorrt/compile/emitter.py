"""The torch-tensorrt target's emitter."""

from __future__ import annotations

import json
from pathlib import Path

from enginewright.passes.framework.base import Pass
from enginewright.passes.ir.program import Program
from enginewright.runtime.bundle.manifest import TargetManifest, target_folder
from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from ...doctor.examine import require
from ...doctor.machine import look_at_machine
from ...emit.base import EmitOptions
from ...emit.bundle_writer import BundleWriter

NAME = "torch-tensorrt"
STEP_FILE = "step.pt2"
"""The file in the target's folder with the compiled step."""

_INPUTS_FILE = "inputs.json"
"""The file next to it with the names of its inputs and results, in order."""


class TorchTensorRtEmitter:
    """Compiles the program by Torch-TensorRT, on the GPU on which it will run."""

    name = NAME

    def passes(self) -> list[Pass]:
        """Returns no passes: TensorRT fuses ops itself."""
        return []

    def emit(
        self, program: Program, writer: BundleWriter, progress: Progress, options: EmitOptions = EmitOptions()
    ) -> TargetManifest:
        """Compiles the step and writes it. Engines depend on the machine, so equal programs may give different bytes.

        Raises VerificationError if the compiled step differs from the program, and the errors of ``check_machine``.
        """
        check_machine()
        from .compile_step import compile_step  # needs torch_tensorrt

        progress(ProgressEvent("emit", 0, 1, self.name))
        scratch = writer.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        path = scratch / STEP_FILE
        step = compile_step(program, path)
        names = {"inputs": step.inputs, "results": step.results}
        writer.write_text(f"{target_folder(self.name)}/{_INPUTS_FILE}", json.dumps(names, indent=1) + "\n")
        writer.adopt(f"{target_folder(self.name)}/{STEP_FILE}", path)
        progress(ProgressEvent("emit", 1, 1, self.name))
        return TargetManifest()


def read_inputs(folder: Path) -> tuple[str, ...]:
    """Returns the names of the step's inputs, in order, from a target's folder. Raises BundleError if it has none."""
    path = folder / _INPUTS_FILE
    try:
        return tuple(map(str, json.loads(read_regular(path, most=MOST_JSON_BYTES))["inputs"]))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise BundleError(f"{path}: the names of the inputs can't be read: {e}", hint="Export the bundle again.") from e


def check_machine() -> None:
    """Raises MissingDependencyError or TargetError with everything that this machine lacks to compile for the
    target.
    """
    require(look_at_machine(), NAME, "compiled")
