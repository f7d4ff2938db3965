"""Checks if a machine can run the torch-tensorrt target."""

from __future__ import annotations

from enginewright.runtime.bundle.manifest import TargetManifest

from ...doctor.checks import (
    Checked,
    Problem,
    gpu_problem,
    torch_problems,
)
from ...doctor.engine import Engine
from ...doctor.machine import Machine

ENGINE = Engine("Torch-TensorRT", ("torch", "torch_tensorrt"))


def check(machine: Machine, target: TargetManifest | None) -> Checked:
    torch, library = machine.packages.get("torch"), machine.packages.get("torch_tensorrt")
    problems = torch_problems(machine, "torch-tensorrt")
    if library is None:
        hint = "Install it with: pip install 'enginewright[torch-tensorrt]'"
        problems.append(Problem("torch_tensorrt is not installed", hint, missing=True))
    if (no_gpu := gpu_problem(machine.gpus, machine.gpu_problem, ())) is not None:
        problems.append(no_gpu)
    on = [] if torch is None else [f"PyTorch {torch}"]
    on += [] if library is None else [f"torch_tensorrt {library}"]
    return Checked(tuple(problems), (", ".join(on),) if on else ())
