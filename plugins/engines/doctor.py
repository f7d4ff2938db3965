"""Checks if a machine can run targets with TensorRT engines."""

from __future__ import annotations

from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.shared.memory import format_bytes

from ..doctor.checks import (
    Check,
    Checked,
    choose_gpu,
    driver_problem,
    gpu_problem,
)
from ..doctor.engine import Engine
from ..doctor.machine import Machine
from .checks import FLAVOURS, build_problem, library_problem
from .section import TensorRtSection


def engine_of(name: str) -> Engine:
    """Returns the library ``name`` ("rtx" or "tensorrt") as an engine for ``optimize doctor --run``."""
    return Engine(FLAVOURS[name].name, (FLAVOURS[name].module,))


def check_tensorrt(name: str) -> Check:
    flavour = FLAVOURS[name]

    def check(machine: Machine, target: TargetManifest | None) -> Checked:
        section = target.section(TensorRtSection) if target is not None else None
        installed = machine.packages.get(flavour.module)
        capabilities, what = flavour.capabilities, f"{flavour.name}'s engines"
        library = library_problem(flavour, installed, "")
        if section is not None and target is not None:
            capabilities, what = section.compute_capabilities, "the engines"
            library = library_problem(flavour, installed, section.version)
            if target.state == "needs-build" and section.paged is not None:
                capabilities, what = section.paged.kernel_capabilities, "the attention kernels"
                library = build_problem(flavour, installed, section.paged.library)
        old = driver_problem(machine, f"{flavour.name} {installed}", machine.cuda_of.get(flavour.module, ""))
        problems = [library, old, gpu_problem(machine.gpus, machine.gpu_problem, capabilities, what)]
        gpu = choose_gpu(machine.gpus, capabilities)
        on = [] if installed is None else [f"{flavour.name} {installed}"]
        on += [] if gpu is None else [f"{gpu.name} ({gpu.capability}), {format_bytes(gpu.memory_bytes)}"]
        return Checked(tuple(p for p in problems if p is not None), (", ".join(on),) if on else ())

    return check
