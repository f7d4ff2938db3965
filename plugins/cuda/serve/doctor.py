"""Checks if a machine can run the cuda target."""

from __future__ import annotations

from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.shared.memory import format_bytes

from ...doctor.checks import (
    Checked,
    gpu_problem,
    torch_problems,
)
from ...doctor.engine import Engine
from ...doctor.machine import Machine
from ...gpu.compile_ahead import interprets
from ...gpu.cuda_driver import InstalledGpu
from ...gpu.tiles import GPUS, capability_of, code_for, machine_code_runs, number_of
from ..section import CudaSection


def _exported_for(capability: str) -> str:
    """Returns the compute capability whose kernels a GPU runs best if all are compiled; the GPU's own if none run on
    it.
    """
    number = code_for(number_of(capability), GPUS, GPUS)
    return capability if number is None else capability_of(number)


ENGINE = Engine("PyTorch and Triton", ("torch", "triton"), _exported_for)


def check(machine: Machine, target: TargetManifest | None) -> Checked:
    if interprets():
        return Checked((), ("Triton's interpreter on the CPU, which is for tests",))
    section = target.section(CudaSection) if target is not None else None
    problems = torch_problems(machine, "cuda")  # Triton compiles kernels for an export; a bundle has them
    fitting = [gpu for gpu in machine.gpus if section is None or section.kernels_for(gpu.capability) is not None]
    if not fitting:
        known = section.compute_capabilities if section is not None else ()
        if (problem := gpu_problem(machine.gpus, machine.gpu_problem, known, "the kernels")) is not None:
            problems.append(problem)
    on = [f"PyTorch {machine.packages['torch']}"] if "torch" in machine.packages else []
    on += [f"{gpu.name} ({gpu.capability}), {format_bytes(gpu.memory_bytes)}" for gpu in fitting[:1]]
    devices = (", ".join(on),) if on else ()
    return Checked(tuple(problems), devices + (_as_ptx(machine, section, fitting[0]) if section and fitting else ()))


def _as_ptx(machine: Machine, section: CudaSection, gpu: InstalledGpu) -> tuple[str, ...]:
    """Returns notes with the reasons why the driver must translate a bundle's kernels from PTX; () if it needn't."""
    made_for = section.kernels_for(gpu.capability)
    assert made_for is not None
    if not machine_code_runs(number_of(made_for), number_of(gpu.capability), family=made_for in section.families):
        return (f"kernels as PTX of {made_for}, which the driver translates: export with --gpu {gpu.capability}",)
    by = section.assemblers.get(made_for, "")
    if by and machine.cuda and int(by.partition(".")[0]) > int(machine.cuda.partition(".")[0]):
        reason = f"its machine code is of CUDA {by}, and the driver runs CUDA {machine.cuda}"
        return (f"kernels as PTX, which the driver translates: {reason}",)
    return ()
