"""Checks if a machine can run the onnx target."""

from __future__ import annotations

from importlib import util
from typing import Any

from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.shared.errors import MissingDependencyError

from ...doctor.checks import (
    Checked,
    Problem,
    is_older,
)
from ...doctor.machine import Machine
from ...steps.linear_io import LinearIo
from ..kernels.library import NAME as OPERATORS
from ..kernels.library import find_operators
from .session import OLDEST, PROVIDERS, load_onnxruntime


def check(machine: Machine, target: TargetManifest | None) -> Checked:
    io = target.section(LinearIo) if target is not None else None
    needed = OLDEST if io is None else io.onnxruntime
    installed = machine.packages.get("onnxruntime")
    install = f"Install it with: pip install 'onnxruntime>={needed}', or enginewright[onnx], or [onnx-gpu] for a GPU"
    if installed is None:
        return Checked((Problem("onnxruntime is not installed", install, missing=True),))
    if why := machine.problems.get("onnxruntime"):
        return Checked((Problem(why, f"Install it anew: pip install --force-reinstall 'onnxruntime>={needed}'"),))
    if is_older(installed, needed):
        return Checked((Problem(f"it needs onnxruntime {needed} or newer, and {installed} is installed", install),))
    known = [name for name, provider in PROVIDERS.items() if provider.full_name in machine.providers]
    on = f"onnxruntime {installed}, providers {', '.join(known) or 'unknown'}"
    return Checked(on=(on, *_variant(io, machine), *_idle_gpu(machine)))


def _idle_gpu(machine: Machine) -> tuple[str, ...]:
    """Returns a hint to install a provider for the unused GPU; () if there is no GPU, or if it can be used."""
    if not machine.gpus or PROVIDERS["cuda"].full_name in machine.providers:
        return ()
    return (
        f"{machine.gpus[0].name} isn't used: that needs provider cuda (pip uninstall onnxruntime, then pip install "
        "'enginewright[onnx-gpu]')",
    )


def _variant(io: LinearIo | None, machine: Machine) -> tuple[str, ...]:
    """Returns a note on which of several files runs on a CPU, and why it isn't the fastest; () if it is."""
    if io is None or len(io.variants) == 1:
        return ()
    fastest = io.fastest(operators=machine.onnx_operators)
    runs = f"on a CPU its variant {fastest} runs"
    return (runs if fastest == io.variants[-1] else f"{runs}: variant kernels needs {OPERATORS}, which is missing",)


def look(problems: dict[str, str]) -> dict[str, Any]:
    """Returns the fields of ``Machine`` that this target needs. It imports onnxruntime, since nothing else knows its
    providers.
    """
    return {"providers": _providers(problems), "onnx_operators": find_operators() is not None}


def _providers(problems: dict[str, str]) -> tuple[str, ...]:
    if util.find_spec("onnxruntime") is None:
        return ()
    try:
        return tuple(load_onnxruntime("0").get_available_providers())
    except MissingDependencyError as e:
        problems["onnxruntime"] = e.message
        return ()
