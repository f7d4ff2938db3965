"""Checks if a machine can run the stablehlo target."""

from __future__ import annotations

from typing import Any

from enginewright.runtime.bundle.manifest import TargetManifest

from ...doctor.checks import (
    Checked,
    Problem,
)
from ...doctor.machine import Machine
from ...steps.x86_levels import best_level
from ..kernels.library import NAME as HANDLERS
from ..kernels.library import find_handlers
from ..section import IreeSection, StableHloSection
from .pjrt_library import INSTALL as INSTALL_JAXLIB
from .pjrt_library import TESTED, is_tested, plugins


def check(machine: Machine, target: TargetManifest | None) -> Checked:
    """Checks if XLA, or IREE if the bundle has modules for it, can run the target on this machine."""
    section = target.section(StableHloSection) if target is not None else None
    problem, on = _xla(machine, section)
    iree, ahead = _iree(machine, section)
    if problem is None:
        return Checked(on=(on, *ahead, *(() if iree is None else (f"not by IREE: {iree.message}",))))
    if section is None or section.iree is None or not section.iree.levels:
        return Checked((problem,))
    if iree is None:
        return Checked(on=(*ahead, f"not by XLA: {problem.message}"))
    return Checked((problem, iree))


def _xla(machine: Machine, section: StableHloSection | None) -> tuple[Problem | None, str]:
    """Returns the problem with jaxlib, None if there is none, and a note on it."""
    installed = machine.packages.get("jaxlib")
    if installed is None:
        return Problem("jaxlib is not installed", INSTALL_JAXLIB, missing=True), ""
    if not is_tested(installed):
        hint = f"Install that one: pip install 'jaxlib=={TESTED}.*'"
        return Problem(f"it runs on jaxlib {TESTED}, and {installed} is installed", hint), ""
    if section is not None and section.kernels and not machine.xla_handlers:
        problem = f"its modules call our kernels, and {HANDLERS} is missing"
        return Problem(problem, "Install enginewright with pip, or build it in the source tree."), ""
    return None, f"jaxlib {installed}, providers {', '.join(('cpu', *machine.pjrt_plugins))}"


def _iree(machine: Machine, section: StableHloSection | None) -> tuple[Problem | None, tuple[str, ...]]:
    """Returns the problem with running a bundle's IREE modules, None if there is none, and notes on the devices that
    run them.
    """
    installed = machine.packages.get("iree")
    if section is None or section.iree is None:
        return None, (f"IREE {installed}, provider iree",) if installed and section is None else ()
    files = section.iree.cuda
    on = (f"modules of IREE for CUDA {', '.join(files)}, which nothing here runs",) if files else ()
    if not section.iree.levels:
        return None, on
    level = best_level(section.iree.levels, machine.features)
    problem = iree_problem(section.iree, installed) or (iree_level_problem(section.iree) if level is None else None)
    return (problem, on) if problem else (None, (f"IREE {installed}, provider iree, for x86-64-{level}", *on))


def iree_problem(section: IreeSection, found: str | None) -> Problem | None:
    """Returns the problem if the installed version of IREE, ``found``, isn't the modules' version; otherwise None."""
    if found == section.version:
        return None
    hint = f"Install that one: pip install 'iree-base-runtime=={section.version}'; or export the bundle again."
    if found is None:
        return Problem("IREE's runtime (iree-base-runtime) is not installed", hint, missing=True)
    return Problem(f"its modules for IREE were made by version {section.version}, and {found} is installed", hint)


def iree_level_problem(section: IreeSection) -> Problem:
    """Returns the problem that the modules are for other CPUs."""
    names = " and ".join(f"x86-64-{name}" for name in section.levels)
    hint = "Export again with a level that it has in the recipe's [stablehlo] iree, or take provider cpu."
    return Problem(f"its modules for IREE are for {names}, whose instructions this processor doesn't have", hint)


def look(problems: dict[str, str]) -> dict[str, Any]:
    """Returns the fields of ``Machine`` that this target needs. ``problems`` isn't changed."""
    return {"xla_handlers": find_handlers() is not None, "pjrt_plugins": tuple(plugins())}
