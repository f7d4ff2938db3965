"""Checks if a machine can run the tvm target."""

from __future__ import annotations

from enginewright.runtime.bundle.manifest import TargetManifest

from ...doctor.checks import (
    Checked,
    Problem,
)
from ...doctor.machine import Machine
from ...steps.x86_levels import best_level
from ..section import TvmSection


def check(machine: Machine, target: TargetManifest | None) -> Checked:
    section = target.section(TvmSection) if target is not None else None
    version = machine.packages.get("tvm")
    if version is None:
        hint = "Install it with: pip install 'enginewright[tvm]'"
        return Checked((Problem("TVM (apache-tvm) is not installed", hint, missing=True),))
    if section is None:
        return Checked(on=(f"TVM {version}",))
    if problem := tvm_problem(section, version):
        return Checked((problem,))
    level = best_level(section.levels, machine.features)
    if level is None:
        return Checked((level_problem(section),))
    ours = f", products and attention by {section.kernels}'s kernels" if section.kernels else ""
    files = (f"CUDA source for {', '.join(section.cuda)}, which nothing here runs",) if section.cuda else ()
    return Checked(on=(f"TVM {version}, kernels for x86-64-{level}{ours}", *files))


def tvm_problem(section: TvmSection, found: str) -> Problem | None:
    """Returns the problem if the installed TVM, version ``found``, isn't the version that compiled the libraries;
    otherwise None.
    """
    if found == section.version:
        return None
    hint = f"Install that one: pip install 'apache-tvm=={section.version}'; or export the bundle again."
    return Problem(f"its libraries were made by TVM {section.version}, and {found} is installed", hint)


def level_problem(section: TvmSection) -> Problem:
    """Returns the problem that the libraries are for other CPUs."""
    names = " and ".join(f"x86-64-{name}" for name in section.levels)
    hint = "Export again with a level that it has in the recipe's [tvm] levels, or take --target cpu."
    return Problem(f"its libraries are for {names}, whose instructions this processor doesn't have", hint)
